"""Steps any kind of stage and isolates its failures: only requests in the stage are affected.

A stage that a failure leaves in an unknown state is rebuilt. Its steps use the number of CPU
threads that its placement sets.
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

MAX_REBUILDS = 3
"""Maximum number of consecutive rebuilds of a stage without a finished request."""


class BrokenStage:
    """Rebuilds a stage that broke, a limited number of times.

    ::

        works ──► broken ──► rebuilt ──► finishes a request: works
                    ▲             └──► broken ──► ... at most ``MAX_REBUILDS`` times in a row
                    └── cannot be built: retried when a request comes, with the same limit

    Attributes:
        failure: why the last attempt to rebuild the stage failed; None if it succeeded.
        num_rebuilds: rebuilds since the stage last finished a request.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._cause: str | None = None
        self.num_rebuilds = 0
        self.failure: str | None = None
        self._is_final = False

    @property
    def is_broken(self) -> bool:
        """True if the stage cannot be used until it is rebuilt."""
        return self._cause is not None

    def note(self, error: Exception, *, after: str | None = None) -> None:
        """Mark the stage as broken by its first error, which may follow an error ``after``."""
        _logger.error("stage %r cannot go on", self._stage.name, exc_info=error)
        if self._cause is None:
            self._cause = f"{type(error).__name__}: {error}"
            if after is not None:
                self._cause += f" (after {after})"
        # A log or a caller may keep the traceback, whose frames would keep the model in memory.
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__

    def rebuild(self) -> str:
        """Rebuild the stage, which frees what it holds; return the error of the requests in it.

        Raises:
            ValueError: it cannot be built, now or ever; the message has the reason.
        """
        if self._is_final:
            raise self._refusal()
        name, cause = self._stage.name, self._cause
        self.num_rebuilds += 1
        count = self.num_rebuilds
        if count > MAX_REBUILDS:
            raise self._give_up(f"it broke {count} times in a row, the last time by {cause}")
        _logger.warning(
            "stage %r is to be rebuilt, since it broke (%s): %d of at most %d times in a row",
            *(name, cause, count, MAX_REBUILDS),
        )
        try:
            self._stage.rebuild()
        except NotImplementedError as error:
            raise self._give_up(f"it broke by {cause} and cannot be rebuilt: {error}") from error
        except Exception as error:  # building a model may raise anything; a retry may have memory
            _logger.error("stage %r could not be rebuilt", name, exc_info=error)
            cause_now = f"{type(error).__name__}: {error}"
            self.failure = f"it broke by {cause} and could not be rebuilt: {cause_now}"
            raise ValueError(self.failure) from error
        self._cause = self.failure = None
        return f"it broke while it had this request, and was rebuilt: ask again ({cause})"

    def _give_up(self, why: str) -> ValueError:
        self.failure, self._is_final = why, True
        _logger.error("stage %r cannot be used any more: %s", self._stage.name, why)
        return self._refusal()

    def _refusal(self) -> ValueError:
        return ValueError(f"it cannot be used any more: {self.failure}; build the pipeline again")


class StepThreads:
    """Context that sets the number of threads of a stage, for stages that share a process. ::

        writer (threads: 1)   ──■──────■──────■──      one thread
        reader (none given)   ────■──────■──────■      PyTorch's number in this process

    In the pipeline's own thread a number stays until a stage with another number steps. A caller's
    thread gets its own number back after each step.

    A stage whose placement sets no number uses that of the thread that called :meth:`own_thread`.
    """

    def __init__(self, stage: Stage) -> None:
        built_of = stage.built_of
        self._count = built_of.placement.threads if isinstance(built_of, StageConfig) else None
        self._default_count: int | None = None
        self._before: int | None = None

    def own_thread(self) -> None:
        """Declare that from now on the pipeline steps in a dedicated thread."""
        import torch  # not needed where stages run elsewhere

        self._default_count = torch.get_num_threads()

    def __enter__(self) -> None:
        """Set the stage's number of threads."""
        wanted = self._count if self._count is not None else self._default_count
        if wanted is None:
            return
        import torch

        before = torch.get_num_threads()
        if before == wanted:
            return
        if self._default_count is None:
            torch.set_num_threads(wanted)
            self._before = before
        else:
            _set_thread_count(wanted)

    def __exit__(self, *error: object) -> None:
        """Restore the number of a caller's thread."""
        if self._before is not None:
            import torch

            torch.set_num_threads(self._before)
            self._before = None


def _set_thread_count(count: int) -> None:
    """Set the number of threads for operations of this thread, without affecting other threads.

    PyTorch gives a new thread the number that any thread set last. So after setting it for this
    thread, a throwaway thread sets the previous default again for future threads.
    """
    import torch

    with turn_of(torch):
        with ThreadPoolExecutor(1) as new_thread:
            others = new_thread.submit(torch.get_num_threads).result()
        torch.set_num_threads(count)
        with ThreadPoolExecutor(1) as new_thread:
            new_thread.submit(torch.set_num_threads, others).result()


class GuardedStage:
    """An initially idle stage with its requests, and the handling of its failures.

    Whatever the stage or its transform raises becomes one error with the stage's name. A stage that
    cannot be cleaned up after a failure is rebuilt. Its requests without any emitted output are
    restarted in it, once; the others fail.

    Attributes:
        inside: the stage's requests, by id.
        threads: sets the number of threads of its steps.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.inside: dict[str, RequestState] = {}
        self._broken = BrokenStage(stage)
        self.threads = StepThreads(stage)
        # Errors of requests that were lost when the stage was rebuilt.
        self._lost: dict[str, str] = {}
        # Exception of the last step, if it raised one that did not break the stage.
        self._step_error: str | None = None

    def prepare(self, state: RequestState) -> Prepared:
        """Let the stage prepare a request whose prompt is made, or refuse it; thread-safe."""
        assert state.request is not None, "its prompt has been made"
        with self.blamed(state.request_id):
            return self.stage.prepare(state.request)

    def add(self, state: RequestState, prepared: Prepared) -> None:
        """Add a prepared request to the stage; ``ValueError``: it refuses, or is unusable."""
        if self._broken.is_broken and (failure := self._rebuild()) is not None:
            raise ValueError(f"stage {self.stage.name!r}: {failure}")
        state.is_inside = True
        self.inside[state.request_id] = state
        with self.blamed(state.request_id):
            try:
                self.stage.add(prepared)
            except Exception as error:  # the stage may raise anything, and be broken by it
                if not self.stage.is_broken:
                    raise
                # Perhaps since earlier: without requests nothing revealed it.
                self._broken.note(error)
                self._rebuild()
                if (failure := self._lost.pop(state.request_id, None)) is not None:
                    raise ValueError(failure) from error

    def step(self) -> tuple[list[OutputDelta], Mapping[str, str]]:
        """Run one unit of work of the stage.

        Returns:
            The new deltas; and ``request_id -> error`` of lost requests, all of which are still
            inside.
        """
        with log_fields(self.stage.name), self.threads:
            lost, self._step_error = self._lost, None
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
                        self._step_error = f"{type(error).__name__}: {error}"
                        message = f"its step failed: {self._step_error}"
                        lost.update(dict.fromkeys(self.inside, message))
            self._lost = {}
            return [], lost

    def _step_deltas(self) -> list[OutputDelta]:
        """Run one unit of work and return the new deltas.

        Engine stages return deltas themselves. Other kinds of stage return cumulative outputs from
        ``step``, from which the deltas are computed here.
        """
        stage = self.stage
        # A stage whose ``step`` was overridden, in a subclass or by a test, is called that way.
        own = getattr(stage.step, "__func__", None)
        if isinstance(stage, EngineStage) and own is EngineStage.step:
            return stage.step_deltas()
        return [self._delta(output) for output in stage.step()]

    def _delta(self, output: StageOutput) -> OutputDelta:
        request_id = output.request_id
        state = self.inside.get(request_id)
        try:
            delta = delta_since(output, None if state is None else state.last)
        except ValueError as error:  # fail it alone: the step's other outputs must not be lost
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
        """Discard the stage's cache and check it after a failed step; it must be idle."""
        if self._broken.is_broken:
            return
        with log_fields(self.stage.name):
            try:
                self.stage.reset_prefix_cache()
                self.stage.check_integrity()
            except Exception as error:  # whatever it is, the stage is rebuilt on next use
                self._broken.note(error, after=self._step_error)

    def repair(self) -> str | None:
        """Rebuild a broken stage without requests, once; return why it is unusable, or None."""
        broken = self._broken
        if broken.is_broken and broken.failure is None and not self.inside:
            self._rebuild()
        return broken.failure

    def leave(self, state: RequestState, *, has_failed: bool) -> None:
        """Remove a request that the stage is done with."""
        del self.inside[state.request_id]
        state.is_inside = False
        if not has_failed:
            self._broken.num_rebuilds = 0

    def resume(self, state: RequestState) -> None:
        """Resume a paused request."""
        state.is_paused = False
        if self._broken.is_broken:
            return
        try:
            self.stage.resume_request(state.request_id)
        except Exception as error:  # its requests end, or are restarted, in the next step
            self._broken.note(error)

    def drop(self, state: RequestState) -> None:
        """Abort a request in the stage, if it is there."""
        if not state.is_inside:
            return
        self._abort(state.request_id)
        self.inside.pop(state.request_id, None)
        state.is_inside = False
        self._lost.pop(state.request_id, None)

    def drop_all(self) -> None:
        """Abort all requests in the stage, whatever state an exception left."""
        inside, self.inside = self.inside, {}
        self._lost, self._step_error = {}, None
        for state in inside.values():
            state.is_inside = False
            self._abort(state.request_id)
        if not self._broken.is_broken and self.stage.has_unfinished_requests:
            self._broken.note(RuntimeError("it holds requests that are over"))
        self.recover()

    def _abort(self, request_id: str) -> None:
        try:
            self.stage.abort(request_id)
        except Exception as error:  # the request is over anyway; the stage may be broken
            if not self._broken.is_broken:
                self._broken.note(error, after=self._step_error)

    def _rebuild(self) -> str | None:
        """Rebuild the stage, and restart or fail its requests; return why it is unusable."""
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
        """Add a request to the stage again, if it has emitted nothing; return True if added."""
        # The consumed chunks of a streamed prompt are gone.
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
        """Context that turns exceptions of the stage or its transform into a ``ValueError``."""
        return Blamed(self.stage.name, request_id)


class Blamed(log_fields):
    """Log fields that also turn exceptions into a ``ValueError`` naming the stage; single use."""

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
