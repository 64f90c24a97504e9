"""A pipeline's stages, kept from spoiling more than the one request or stage that fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine import CodecPrompt, Prompt, SpeechPrompt
from omni.pipelines.pipeline import Pipeline
from omni.runtime.live_request import LiveRequest
from stages import Stage, StageOutput, StageRequest, TransformContext

__all__ = ["GuardedStages", "blamed_on"]

_logger = logging.getLogger(__name__)


class GuardedStages:
    """Who is in which stage, and which stages can be used no more.

    Whatever a stage or a transform raises becomes one error with the stage's name.

    Args:
        pipeline: the stages; they must be idle.

    Attributes:
        pipeline: as given.
        inside: by stage, the requests that it has, by their ids.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.inside: dict[str, dict[str, LiveRequest]] = {name: {} for name in pipeline.order}
        self._broken: dict[str, str] = {}

    def has(self, live: LiveRequest) -> bool:
        """Whether any stage has a request."""
        return any(live.request_id in inside for inside in self.inside.values())

    def enter(self, live: LiveRequest, stage: Stage, prompt: Prompt) -> None:
        """Hand a request to a stage that it waited for.

        Raises:
            ValueError: the stage refused it, or can be used no more.
        """
        if stage.name in self._broken:
            raise ValueError(f"stage {stage.name!r}: {self._broken[stage.name]}")
        live.waiting.discard(stage.name)
        self.inside[stage.name][live.request_id] = live
        with blamed_on(stage, live):
            stage.add_request(
                StageRequest(
                    request_id=live.request_id,
                    prompt=prompt,
                    sampling=live.sampling.get(stage.name),
                    priority=live.request.priority,
                    cache_salt=live.request.cache_salt,
                )
            )

    def step(self, stage: Stage) -> tuple[list[StageOutput], str | None]:
        """One unit of work of a stage: its outputs, and what went wrong if all of it did."""
        if stage.name in self._broken:
            return [], self._broken[stage.name]
        try:
            return stage.step(), None
        except Exception as error:  # whatever it is, the other stages' requests go on
            _logger.exception("stage %r failed in a step", stage.name)
            return [], f"its step failed: {type(error).__name__}: {error}"

    def recover(self, stage: Stage) -> None:
        """After a failed step, trust nothing that the stage had cached."""
        if stage.name in self._broken:
            return
        try:
            stage.reset_prefix_cache()
            stage.check_integrity()
        except Exception as error:
            self._break(stage, error)

    def resume(self, live: LiveRequest, stage: Stage) -> None:
        """Let a paused request go on."""
        live.paused.discard(stage.name)
        try:
            stage.resume_request(live.request_id)
        except Exception as error:  # its requests end when it is next due
            self._break(stage, error)

    def abort(self, live: LiveRequest) -> None:
        """Take a request out of every stage that has it."""
        for name, inside in self.inside.items():
            if inside.pop(live.request_id, None) is None:
                continue
            stage = self.pipeline.stages[name]
            try:
                stage.abort(live.request_id)
            except Exception as error:  # the request is over either way; the stage may be as well
                self._break(stage, error)

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

    def _break(self, stage: Stage, error: Exception) -> None:
        _logger.exception("stage %r cannot go on", stage.name)
        self._broken[stage.name] = (
            f"it cannot be used any more, since it could not be cleaned up after a failure: "
            f"{type(error).__name__}: {error}"
        )


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
