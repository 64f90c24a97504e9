"""A pipeline's stages, kept from spoiling more than the one request or stage that fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine import CodecPrompt, Prompt, SpeechPrompt
from engine.interface.engine import Admit, Prepare
from omni.pipelines.pipeline import Pipeline
from omni.runtime.broken_stages import BrokenStages
from omni.runtime.live_request import LiveRequest
from stages import Stage, StageOutput, StageRequest, TransformContext

__all__ = ["GuardedStages", "blamed_on"]

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stay:
    """A request's time in one stage.

    Attributes:
        request: as the stage got it.
        has_begun_anew: whether the stage broke under it before.
    """

    request: StageRequest
    has_begun_anew: bool = False


class GuardedStages:
    """Who is in which stage, and what becomes of them if it breaks.

    Whatever a stage or a transform raises becomes one error with the stage's name. A stage that
    cannot be cleaned up after a failure is built anew. Of the requests that it had, those of which
    nothing was told yet begin anew in it, once; the others fail.

    Args:
        pipeline: the stages; they must be idle.

    Attributes:
        pipeline: as given.
        inside: by stage, the requests that it has, by their ids.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        pipeline.ownership.check()
        self.pipeline = pipeline
        self.inside: dict[str, dict[str, LiveRequest]] = {name: {} for name in pipeline.order}
        self._stays: dict[tuple[str, str], _Stay] = {}
        self._broken = BrokenStages()
        # By stage, what is to be told to requests that it lost when it was built anew.
        self._lost: dict[str, dict[str, str]] = {name: {} for name in pipeline.order}

    def has(self, live: LiveRequest) -> bool:
        """Whether any stage has a request."""
        return any(live.request_id in inside for inside in self.inside.values())

    def enter(self, live: LiveRequest, stage: Stage, prompt: Prompt) -> None:
        """Hand a request to a stage that it waited for.

        Raises:
            ValueError: the stage refused it, or can be used no more.
        """
        prepare = self.begin(live, stage, prompt)
        admit = prepare()
        admit()

    def begin(self, live: LiveRequest, stage: Stage, prompt: Prompt) -> Prepare:
        """Begin to hand a request to a stage that it waited for.

        Returns:
            What prepares it, in any thread, and gives what lets it in, in this one. All three
            raise ``ValueError`` if the stage refuses it, or can be used no more.
        """
        self._check_usable(stage)
        live.waiting.discard(stage.name)
        request = StageRequest(
            request_id=live.request_id,
            prompt=prompt,
            sampling=live.sampling.get(stage.name),
            priority=live.request.priority,
            cache_salt=live.request.cache_salt,
        )
        with blamed_on(stage, live):
            prepare = stage.begin_request(request)

        def prepared() -> Admit:
            with blamed_on(stage, live):
                admit = prepare()
            return lambda: self._admit(live, stage, request, admit)

        return prepared

    def _check_usable(self, stage: Stage) -> None:
        if stage.name in self._broken and (failure := self._rebuild(stage)) is not None:
            raise ValueError(f"stage {stage.name!r}: {failure}")

    def _admit(self, live: LiveRequest, stage: Stage, request: StageRequest, admit: Admit) -> None:
        self._check_usable(stage)
        self.inside[stage.name][live.request_id] = live
        self._stays[stage.name, live.request_id] = _Stay(request)
        with blamed_on(stage, live):
            try:
                admit()
            except Exception as error:
                if not stage.is_broken:
                    raise
                # Since earlier, perhaps: without requests there was nothing to tell it by.
                self._broken.note(stage, error)
                self._rebuild(stage)
                if (failure := self._lost[stage.name].pop(live.request_id, None)) is not None:
                    raise ValueError(failure) from error

    def step(self, stage: Stage) -> tuple[list[StageOutput], Mapping[str, str]]:
        """One unit of work of a stage.

        Returns:
            Its outputs; and ``request_id -> error`` of those requests that it has lost, which all
            are still inside.
        """
        lost = self._lost[stage.name]
        if stage.name in self._broken:
            self._rebuild(stage)
        elif not lost:
            try:
                return stage.step(), {}
            except Exception as error:  # whatever it is, the other stages' requests go on
                if stage.is_broken:
                    self._broken.note(stage, error)
                    self._rebuild(stage)
                else:
                    _logger.exception("stage %r failed in a step", stage.name)
                    message = f"its step failed: {type(error).__name__}: {error}"
                    lost.update(dict.fromkeys(self.inside[stage.name], message))
        self._lost[stage.name] = {}
        return [], lost

    def recover(self, stage: Stage) -> None:
        """After a failed step, trust nothing that the stage had cached; it must be idle."""
        if stage.name in self._broken:
            return
        try:
            stage.reset_prefix_cache()
            stage.check_integrity()
        except Exception as error:
            self._broken.note(stage, error)

    def leave(self, live: LiveRequest, stage: Stage, *, has_failed: bool) -> None:
        """A stage is done with a request."""
        del self.inside[stage.name][live.request_id]
        del self._stays[stage.name, live.request_id]
        if not has_failed:
            self._broken.note_success(stage)

    def resume(self, live: LiveRequest, stage: Stage) -> None:
        """Let a paused request go on."""
        live.paused.discard(stage.name)
        if stage.name in self._broken:
            return
        try:
            stage.resume_request(live.request_id)
        except Exception as error:  # its requests end, or begin anew, when it is next due
            self._broken.note(stage, error)

    def abort(self, live: LiveRequest) -> None:
        """Take a request out of every stage that has it."""
        for name, inside in self.inside.items():
            if inside.pop(live.request_id, None) is None:
                continue
            del self._stays[name, live.request_id]
            self._lost[name].pop(live.request_id, None)
            stage = self.pipeline.stages[name]
            try:
                stage.abort(live.request_id)
            except Exception as error:  # the request is over either way; the stage may be as well
                if name not in self._broken:
                    self._broken.note(stage, error)

    def _rebuild(self, stage: Stage) -> str | None:
        """Build a broken stage anew, and see to the requests that it had.

        Returns:
            Why it can be used no more; None if it can.
        """
        inside, lost = self.inside[stage.name], self._lost[stage.name]
        try:
            told = self._broken.rebuild(stage)
        except ValueError as error:
            lost.update(dict.fromkeys(inside, str(error)))
            return str(error)
        for request_id, live in inside.items():
            live.paused.discard(stage.name)
            if request_id not in lost and not self._begin_anew(live, stage):
                lost[request_id] = told
        return None

    def _begin_anew(self, live: LiveRequest, stage: Stage) -> bool:
        """Hand a request to a stage once more, if nobody can tell the difference."""
        stay = self._stays[stage.name, live.request_id]
        # Of a prompt that came in chunks, those that were taken are gone.
        if stay.has_begun_anew or stage.name in live.streams or live.was_told_of(stage):
            return False
        stay.has_begun_anew = True
        try:
            with blamed_on(stage, live):
                stage.add_request(stay.request)
        except ValueError:
            _logger.exception("request %r could not begin anew", live.request_id)
            return False
        return True

    def prompt(
        self, live: LiveRequest, stage: Stage, sources: Sequence[StageOutput], *, first_row: int = 0
    ) -> Prompt:
        """A request's prompt for a stage: the user's own, or what the stage's transform makes.

        Args:
            live: the request.
            stage: that the prompt is for.
            sources: outputs of the stages that feed it; more follow of one that is not finished.
            first_row: place of the first row of their tensors.

        Raises:
            ValueError: the transform failed, or made what is no prompt or would never end.
        """
        transform = self.pipeline.transforms.get(stage.name)
        is_last = all(source.finished for source in sources)
        with blamed_on(stage, live):
            prompt = live.request.prompt
            if transform is not None:
                context = TransformContext(
                    live.request_id,
                    live.request.prompt,
                    tuple(sources),
                    speaker=live.speaker,
                    first_row=first_row,
                    is_last=is_last,
                )
                made: object = transform(context)  # a user's code may return anything
                if not isinstance(made, Prompt):
                    kind = type(made).__name__
                    raise ValueError(f"its transform returned a {kind}, not a prompt")
                prompt = made
            # A stage would wait for more, which never comes.
            if is_last and isinstance(prompt, CodecPrompt | SpeechPrompt) and not prompt.is_last:
                raise ValueError(
                    f"it got a {type(prompt).__name__} with is_last=False, but nothing follows; a "
                    "transform hands on the is_last of its context"
                )
        return prompt


@contextmanager
def blamed_on(stage: Stage, live: LiveRequest) -> Iterator[None]:
    """Turn whatever a stage or its transform raises, which may be a user's code, into one error.

    Raises:
        ValueError: with the stage's name.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"stage {stage.name!r}: {error}") from error
    except Exception as error:
        _logger.exception("stage %r failed on request %r", stage.name, live.request_id)
        raise ValueError(f"stage {stage.name!r}: {type(error).__name__}: {error}") from error
