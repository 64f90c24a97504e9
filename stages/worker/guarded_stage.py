"""Steps any kind of stage for what is new, and guards it: a failure ends its requests alone.

A stage that a failure leaves in an unknown state is rebuilt. Its steps take the number of CPU
threads that its placement names.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from engine import FinishReason
from engine.interface.log_fields import log_fields, package_logger
from engine.interface.outputs import OutputDelta
from engine.interface.ownership import turn_of
from stages.engine_stage import EngineStage
from stages.stage import Prepared, Stage
from stages.stage_config import StageConfig
from stages.stage_output import StageOutput, delta_since
from stages.worker.request_state import RequestState

_logger = package_logger(__name__)

MOST_REBUILDS = 3
"""How often in a row a stage is rebuilt without finishing any request in between."""


class BrokenStage:
    """Rebuilds a stage that broke, as long as there is hope.

    ::

        works ──► broken ──► rebuilt ──► finishes a request: works
                    ▲             └──► broken ──► ... at most ``MOST_REBUILDS`` times in a row
                    └── cannot be built: tried again when a request comes, as often

    Attributes:
        failure: why the stage could not be rebuilt when that was last tried; None if it could.
        num_rebuilds: since it last finished a request.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._cause: str | None = None
        self.num_rebuilds = 0
        self.failure: str | None = None
        self._is_hopeless = False

    @property
    def is_broken(self) -> bool:
        """Whether the stage cannot be used as it is."""
        return self._cause is not None

    def note(self, error: Exception, *, after: str | None = None) -> None:
        """Note that the stage cannot go on; its first error, maybe after another, is reported."""
        _logger.error("stage %r cannot go on", self._stage.name, exc_info=error)
        if self._cause is None:
            self._cause = f"{type(error).__name__}: {error}"
            if after is not None:
                self._cause += f" (after {after})"
        # A log or a caller may keep the traceback, whose frames would keep the model's memory.
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__

    def rebuild(self) -> str:
        """Rebuild the stage, which frees what it holds; the message for the requests in it.

        Raises:
            ValueError: it cannot be built, now or ever; says why.
        """
        if self._is_hopeless:
            raise self._refusal()
        name, cause = self._stage.name, self._cause
        self.num_rebuilds += 1
        count = self.num_rebuilds
        if count > MOST_REBUILDS:
            raise self._give_up(f"it broke {count} times in a row, the last time by {cause}")
        _logger.warning(
            "stage %r is to be rebuilt, since it broke (%s): %d of at most %d times in a row",
            *(name, cause, count, MOST_REBUILDS),
        )
        try:
            self._stage.rebuild()
        except NotImplementedError as error:
            raise self._give_up(f"it broke by {cause} and cannot be rebuilt: {error}") from error
        except Exception as error:  # whatever building a model raises; memory may come free later
            _logger.error("stage %r could not be rebuilt", name, exc_info=error)
            cause_now = f"{type(error).__name__}: {error}"
            self.failure = f"it broke by {cause} and could not be rebuilt: {cause_now}"
            raise ValueError(self.failure) from error
        self._cause = self.failure = None
        return f"it broke while it had this request, and was rebuilt: ask again ({cause})"

    def _give_up(self, why: str) -> ValueError:
        self.failure, self._is_hopeless = why, True
        _logger.error("stage %r cannot be used any more: %s", self._stage.name, why)
        return self._refusal()

    def _refusal(self) -> ValueError:
        return ValueError(f"it cannot be used any more: {self.failure}; build the pipeline again")


class StepThreads:
    """Has what runs within take so many threads, as stages that share a process each want. ::

        writer (threads: 1)   ──■──────■──────■──      one thread
        reader (none given)   ────■──────■──────■      as many as PyTorch takes in this process

    In a thread of the pipeline's own a number stays until a stage with another one steps. A thread
    that belongs to the caller has its own number again after each step.

    A stage whose placement names none takes as many as the thread had that made the pipeline's own.
    """

    def __init__(self, stage: Stage) -> None:
        built_of = stage.built_of
        self._count = built_of.placement.threads if isinstance(built_of, StageConfig) else None
        self._of_process: int | None = None
        self._before: int | None = None

    def own_thread(self) -> None:
        """The pipeline steps in a thread of its own from now on, which does nothing else."""
        import torch  # not where stages run elsewhere

        self._of_process = torch.get_num_threads()

    def __enter__(self) -> None:
        """Take as many."""
        wanted = self._count if self._count is not None else self._of_process
        if wanted is None:
            return
        import torch

        before = torch.get_num_threads()
        if before == wanted:
            return
        if self._of_process is None:
            torch.set_num_threads(wanted)
            self._before = before
        else:
            _take_number(wanted)

    def __exit__(self, *error: object) -> None:
        """Give a caller's thread its own number again."""
        if self._before is not None:
            import torch

            torch.set_num_threads(self._before)
            self._before = None


def _take_number(count: int) -> None:
    """Have operations of this thread take so many threads, and those of others as many as before.

    PyTorch gives a thread that is new to it the number that any thread has set last. So what is set
    for one thread is taken back for those to come, by a thread of which nothing else is wanted.
    """
    import torch

    with turn_of(torch):
        with ThreadPoolExecutor(1) as new_thread:
            others = new_thread.submit(torch.get_num_threads).result()
        torch.set_num_threads(count)
        with ThreadPoolExecutor(1) as new_thread:
            new_thread.submit(torch.set_num_threads, others).result()


class GuardedStage:
    """The requests that are in a stage, idle at first, and what becomes of them if it breaks.

    Whatever the stage or its transform raises becomes one error with the stage's name. A stage that
    cannot be cleaned up after a failure is rebuilt. Of the requests that it had, those of which
    nothing was emitted yet start again in it, once; the others fail.

    Attributes:
        inside: the requests that it has, by their ids.
        threads: how many its steps take.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.inside: dict[str, RequestState] = {}
        self._broken = BrokenStage(stage)
        self.threads = StepThreads(stage)
        # The messages for requests that it lost when it was rebuilt.
        self._lost: dict[str, str] = {}
        # What its last step raised, if it did and the stage was not broken by that alone.
        self._raised: str | None = None

    def prepare(self, state: RequestState) -> Prepared:
        """Have the stage prepare a request whose prompt is made, or refuse it; in any thread."""
        assert state.request is not None, "its prompt has been made"
        with self.blamed(state.request_id):
            return self.stage.prepare(state.request)

    def add(self, state: RequestState, prepared: Prepared) -> None:
        """Hand the stage what it has prepared; ``ValueError``: it refuses, or is of no more use."""
        if self._broken.is_broken and (failure := self._rebuild()) is not None:
            raise ValueError(f"stage {self.stage.name!r}: {failure}")
        state.is_inside = True
        self.inside[state.request_id] = state
        with self.blamed(state.request_id):
            try:
                self.stage.add(prepared)
            except Exception as error:  # the stage's own, that it is broken included
                if not self.stage.is_broken:
                    raise
                # Since earlier, perhaps: without requests nothing showed it.
                self._broken.note(error)
                self._rebuild()
                if (failure := self._lost.pop(state.request_id, None)) is not None:
                    raise ValueError(failure) from error

    def step(self) -> tuple[list[OutputDelta], Mapping[str, str]]:
        """One unit of work of the stage.

        Returns:
            What is new; and ``request_id -> error`` of those requests that it has lost, which all
            are still inside.
        """
        with log_fields(self.stage.name), self.threads:
            lost, self._raised = self._lost, None
            if self._broken.is_broken:
                self._rebuild()
            elif not lost:
                try:
                    return self._step_deltas(), {}
                except Exception as error:  # whatever it is, the other stages' requests go on
                    if self.stage.is_broken:
                        self._broken.note(error)
                        self._rebuild()
                    else:
                        _logger.exception("stage %r failed in a step", self.stage.name)
                        self._raised = f"{type(error).__name__}: {error}"
                        message = f"its step failed: {self._raised}"
                        lost.update(dict.fromkeys(self.inside, message))
            self._lost = {}
            return [], lost

    def _step_deltas(self) -> list[OutputDelta]:
        """What is new after one unit of work.

        Stages around an engine say that themselves. A kind of stage from outside returns cumulative
        outputs from ``step``: what they add to the ones before is found here.
        """
        stage = self.stage
        # One whose ``step`` was overridden, in a subclass or by a test, is asked that way.
        own = getattr(stage.step, "__func__", None)
        if isinstance(stage, EngineStage) and own is EngineStage.step:
            return stage.step_deltas()
        return [self._delta(output) for output in stage.step()]

    def _delta(self, output: StageOutput) -> OutputDelta:
        request_id = output.request_id
        state = self.inside.get(request_id)
        try:
            delta = delta_since(output, None if state is None else state.last)
        except ValueError as error:  # its neighbours' outputs are emitted once, now or never
            about = {"request_id": request_id}
            _logger.exception("an output of request %r is not cumulative", request_id, extra=about)
            self.stage.abort(request_id)
            return OutputDelta(
                request_id, finished=True, finish_reason=FinishReason.ERROR, error=str(error)
            )
        if state is not None:
            state.last = output
        return delta

    def recover(self) -> None:
        """After a failed step, trust nothing that the stage had cached; it must be idle."""
        if self._broken.is_broken:
            return
        with log_fields(self.stage.name):
            try:
                self.stage.reset_prefix_cache()
                self.stage.check_integrity()
            except Exception as error:  # whatever it is, the stage is rebuilt when next used
                self._broken.note(error, after=self._raised)

    def repair(self) -> str | None:
        """Rebuild a broken stage without requests, unless that was tried; why it cannot be used."""
        broken = self._broken
        if broken.is_broken and broken.failure is None and not self.inside:
            self._rebuild()
        return broken.failure

    def leave(self, state: RequestState, *, has_failed: bool) -> None:
        """The stage is done with a request."""
        del self.inside[state.request_id]
        state.is_inside = False
        if not has_failed:
            self._broken.num_rebuilds = 0

    def resume(self, state: RequestState) -> None:
        """Let a paused request go on."""
        state.is_paused = False
        if self._broken.is_broken:
            return
        try:
            self.stage.resume_request(state.request_id)
        except Exception as error:  # its requests end, or start again, in the next step
            self._broken.note(error)

    def drop(self, state: RequestState) -> None:
        """Take a request out of the stage, if that has it."""
        if not state.is_inside:
            return
        self._abort(state.request_id)
        self.inside.pop(state.request_id, None)
        state.is_inside = False
        self._lost.pop(state.request_id, None)

    def drop_all(self) -> None:
        """Take all requests out of the stage, whatever state an exception left."""
        inside, self.inside = self.inside, {}
        self._lost, self._raised = {}, None
        for state in inside.values():
            state.is_inside = False
            self._abort(state.request_id)
        if not self._broken.is_broken and self.stage.has_unfinished_requests:
            self._broken.note(RuntimeError("it holds requests that are over"))
        self.recover()

    def _abort(self, request_id: str) -> None:
        try:
            self.stage.abort(request_id)
        except Exception as error:  # the request is over either way; the stage may be as well
            if not self._broken.is_broken:
                self._broken.note(error, after=self._raised)

    def _rebuild(self) -> str | None:
        """Rebuild the broken stage, and see to the requests that it had; why it cannot be used."""
        try:
            message = self._broken.rebuild()
        except ValueError as error:
            self._lost.update(dict.fromkeys(self.inside, str(error)))
            return str(error)
        for request_id, state in self.inside.items():
            state.is_paused = False
            if request_id not in self._lost and not self._restart(state):
                self._lost[request_id] = message
        return None

    def _restart(self, state: RequestState) -> bool:
        """Hand a request to the stage once more, if nothing was emitted that could change."""
        # Of a prompt that came in chunks, those that were taken are gone.
        if state.was_restarted or state.is_streamed or state.has_emitted or state.request is None:
            return False
        state.was_restarted = True
        state.begin_output(self.stage.name)
        try:
            with self.blamed(state.request_id):
                self.stage.add_request(state.request)
        except ValueError:
            about = {"request_id": state.request_id}
            _logger.exception("request %r could not start again", state.request_id, extra=about)
            return False
        return True

    def blamed(self, request_id: str) -> Blamed:
        """Turn whatever the stage or its transform raises into a ``ValueError`` with its name."""
        return Blamed(self.stage.name, request_id)


class Blamed(log_fields):
    """Log fields that also turn errors within into one that names the stage; to be used once."""

    __slots__ = ()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        stage, request_id = self.fields.stage, self.fields.request_id
        try:
            if isinstance(error, ValueError):
                raise ValueError(f"stage {stage!r}: {error}") from error
            if isinstance(error, Exception):  # a user's transform or stage may raise anything
                message = "stage %r failed on request %r"
                _logger.error(message, stage, request_id, exc_info=error)
                raise ValueError(f"stage {stage!r}: {type(error).__name__}: {error}") from error
        finally:
            super().__exit__(kind, error, _)
