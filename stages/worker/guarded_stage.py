"""A stage, kept from spoiling more than the requests that it has when it fails."""

from __future__ import annotations

from collections.abc import Mapping

from engine.interface.engine import Admit, Prepare
from engine.interface.log_fields import log_fields, package_logger
from stages.stage import Stage, StageOutput
from stages.worker.broken_stage import BrokenStage
from stages.worker.stay import Stay
from stages.worker.step_threads import StepThreads

__all__ = ["Blamed", "GuardedStage"]

_logger = package_logger(__name__)


class GuardedStage:
    """The requests that are in a stage, and what becomes of them if it breaks.

    Whatever the stage or its transform raises becomes one error with the stage's name. A stage that
    cannot be cleaned up after a failure is built anew. Of the requests that it had, those of which
    nothing was told yet begin anew in it, once; the others fail.

    Args:
        stage: idle.

    Attributes:
        stage: as given.
        inside: the requests that it has, by their ids.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.inside: dict[str, Stay] = {}
        self._broken = BrokenStage(stage)
        self._threads = StepThreads.of(stage)
        # What is to be told to requests that it lost when it was built anew.
        self._lost: dict[str, str] = {}
        # What its last step raised, if it did and the stage was not broken by that alone.
        self._raised: str | None = None

    def own_thread(self) -> None:
        """See :meth:`~stages.worker.step_threads.StepThreads.own_thread`."""
        self._threads.own_thread()

    def begin(self, stay: Stay) -> Prepare:
        """Begin to hand the stage a request, whose prompt is made.

        Returns:
            What prepares it, in any thread, and gives what lets it in, in this one. All three
            raise ``ValueError`` if the stage refuses it, or can be used no more.
        """
        self._check_usable()
        assert stay.request is not None, "its prompt has been made"
        with self.blamed(stay.request_id):
            prepare = self.stage.begin_request(stay.request)

        def prepared() -> Admit:
            with self.blamed(stay.request_id):
                admit = prepare()
            return lambda: self._admit(stay, admit)

        return prepared

    def _check_usable(self) -> None:
        if self._broken.is_broken and (failure := self._rebuild()) is not None:
            raise ValueError(f"stage {self.stage.name!r}: {failure}")

    def _admit(self, stay: Stay, admit: Admit) -> None:
        self._check_usable()
        stay.is_inside = True
        self.inside[stay.request_id] = stay
        with self.blamed(stay.request_id):
            try:
                admit()
            except Exception as error:  # the stage's own, that it is broken included
                if not self.stage.is_broken:
                    raise
                # Since earlier, perhaps: without requests there was nothing to tell it by.
                self._broken.note(error)
                self._rebuild()
                if (failure := self._lost.pop(stay.request_id, None)) is not None:
                    raise ValueError(failure) from error

    def step(self) -> tuple[list[StageOutput], Mapping[str, str]]:
        """One unit of work of the stage.

        Returns:
            Its outputs; and ``request_id -> error`` of those requests that it has lost, which all
            are still inside.
        """
        with log_fields(self.stage.name), self._threads:
            return self._step()

    def _step(self) -> tuple[list[StageOutput], Mapping[str, str]]:
        lost, self._raised = self._lost, None
        if self._broken.is_broken:
            self._rebuild()
        elif not lost:
            try:
                return self.stage.step(), {}
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

    def recover(self) -> None:
        """After a failed step, trust nothing that the stage had cached; it must be idle."""
        if self._broken.is_broken:
            return
        with log_fields(self.stage.name):
            try:
                self.stage.reset_prefix_cache()
                self.stage.check_integrity()
            except Exception as error:  # whatever it is, the stage is built anew when next used
                self._broken.note(error, after=self._raised)

    def mend(self) -> str | None:
        """Build the stage anew if it is broken, no request is in it, and that has not been tried.

        Returns:
            Why it could not be; None if it can be used.
        """
        broken = self._broken
        if broken.is_broken and broken.failure is None and not self.inside:
            self._rebuild()
        return broken.failure

    def leave(self, stay: Stay, *, has_failed: bool) -> None:
        """The stage is done with a request."""
        del self.inside[stay.request_id]
        stay.is_inside = False
        if not has_failed:
            self._broken.note_success()

    def resume(self, stay: Stay) -> None:
        """Let a paused request go on."""
        stay.is_paused = False
        if self._broken.is_broken:
            return
        try:
            self.stage.resume_request(stay.request_id)
        except Exception as error:  # its requests end, or begin anew, in the next step
            self._broken.note(error)

    def drop(self, stay: Stay) -> None:
        """Take a request out of the stage, if that has it."""
        if not stay.is_inside:
            return
        self._abort(stay.request_id)
        self.inside.pop(stay.request_id, None)
        stay.is_inside = False
        self._lost.pop(stay.request_id, None)

    def drop_all(self) -> None:
        """Take all requests out of the stage, whatever state an exception left."""
        inside, self.inside = self.inside, {}
        self._lost, self._raised = {}, None
        for stay in inside.values():
            stay.is_inside = False
            self._abort(stay.request_id)
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
        """Build the broken stage anew, and see to the requests that it had.

        Returns:
            Why it can be used no more; None if it can.
        """
        try:
            told = self._broken.rebuild()
        except ValueError as error:
            self._lost.update(dict.fromkeys(self.inside, str(error)))
            return str(error)
        for request_id, stay in self.inside.items():
            stay.is_paused = False
            if request_id not in self._lost and not self._begin_anew(stay):
                self._lost[request_id] = told
        return None

    def _begin_anew(self, stay: Stay) -> bool:
        """Hand a request to the stage once more, if nothing that was told of it can change."""
        # Of a prompt that came in chunks, those that were taken are gone.
        if stay.has_begun_anew or stay.is_streamed or stay.was_told_of or stay.request is None:
            return False
        stay.has_begun_anew = True
        try:
            with self.blamed(stay.request_id):
                self.stage.add_request(stay.request)
        except ValueError:
            about = {"request_id": stay.request_id}
            _logger.exception("request %r could not begin anew", stay.request_id, extra=about)
            return False
        return True

    def blamed(self, request_id: str) -> Blamed:
        """Turn whatever the stage or its transform raises, which may be a user's, into one error.

        Raises:
            ValueError: with the stage's name.
        """
        return Blamed(self.stage.name, request_id)


class Blamed:
    """A context whose errors become one that names a stage; to be used once.

    Args:
        stage: its name.
        request_id: whose call it is.
    """

    # Entered at every output of every request: several times cheaper than a generator's context.
    __slots__ = ("_fields", "_request_id", "_stage")

    def __init__(self, stage: str, request_id: str) -> None:
        self._stage, self._request_id = stage, request_id
        self._fields = log_fields(stage, request_id)

    def __enter__(self) -> None:
        self._fields.__enter__()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if isinstance(error, ValueError):
                raise ValueError(f"stage {self._stage!r}: {error}") from error
            if isinstance(error, Exception):  # a user's transform or stage may raise anything
                message = "stage %r failed on request %r"
                _logger.error(message, self._stage, self._request_id, exc_info=error)
                kind = type(error).__name__
                raise ValueError(f"stage {self._stage!r}: {kind}: {error}") from error
        finally:
            self._fields.__exit__()
