"""Outputs that grow token by token, sent as what they grew by."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine import TokenLogprobs, Waveform
from engine.interface.deferred import (
    Deferred,
    DeferredItems,
    as_stored,
    defer,
    items_from,
    num_items,
    with_fields,
)
from stages.remote.control import Grown
from stages.stage import Completion, StageOutput
from stages.worker.messages import Moved

__all__ = ["GrowingOutput", "OutputTails"]


class OutputTails:
    """In a worker: leaves out of every output what the ones before it said."""

    def __init__(self) -> None:
        self._num_told: dict[int, tuple[int, int]] = {}

    def shorten(self, moved: Moved) -> Moved | Grown:
        """What is to be sent; a finished output is whole."""
        output = moved.output
        assert output is not None, "what a stage tells has an output"
        if output.finished:
            self.forget(moved.ticket)
            return moved
        tokens, logprobs = self._num_told.get(moved.ticket, (0, 0))
        new_tokens = items_from(output, "token_ids", tokens)
        has_logprobs = as_stored(output, "logprobs") is not None
        new_logprobs = items_from(output, "logprobs", logprobs) if has_logprobs else None
        self._num_told[moved.ticket] = (
            tokens + len(new_tokens),
            logprobs + len(new_logprobs or ()),
        )
        completions = output.completions
        short = with_fields(
            output,
            text=None,
            token_ids=new_tokens,
            logprobs=new_logprobs,
            completions=completions if len(completions) > 1 else (),
        )
        has_text = as_stored(output, "text") is not None
        return Grown(moved.ticket, short, has_text, len(completions), moved.chunks)

    def forget(self, ticket: int) -> None:
        """A stay is over."""
        self._num_told.pop(ticket, None)


@dataclass(slots=True)
class GrowingOutput:
    """At a link: what a worker has said of a request so far.

    Attributes:
        token_ids: all so far.
        text: all so far, in pieces.
        logprobs: all so far.
        num_chars: of the text.
        num_samples: of the sound that was told in pieces.
    """

    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_chars: int = 0
    num_samples: int = 0

    def grow(self, grown: Grown) -> StageOutput:
        """The whole of an output of which a piece came."""
        short = grown.output
        self.token_ids += short.token_ids
        self.text.append(short.delta)
        self.num_chars += len(short.delta)
        self.logprobs += short.logprobs or ()
        if short.audio_delta is not None:
            self.num_samples += short.audio_delta.samples.shape[0]
        tokens = DeferredItems(self.token_ids, 0, len(self.token_ids))
        parts, num_parts = self.text, len(self.text)
        text = Deferred(lambda: "".join(parts[:num_parts])) if grown.has_text else None
        output = with_fields(
            short,
            text=text,
            token_ids=tokens,
            logprobs=(
                None
                if short.logprobs is None
                else DeferredItems(self.logprobs, 0, len(self.logprobs))
            ),
        )
        if grown.num_completions != 1:
            return output
        return with_fields(
            output,
            completions=defer(
                Deferred(
                    lambda: (
                        Completion(output.text or "", output.token_ids, None, output.logprobs),
                    )
                )
            ),
        )

    def said(self) -> str:
        """All text so far."""
        return "".join(self.text)

    def is_behind(self, other: GrowingOutput) -> bool:
        """Whether it says no more than the other one did."""
        return (
            len(self.token_ids) <= len(other.token_ids)
            and self.num_chars <= other.num_chars
            and self.num_samples <= other.num_samples
        )

    def contradicts(self, output: StageOutput) -> bool:
        """Whether an output does not begin with what was said."""
        num_tokens = num_items(output, "token_ids")
        return (
            num_tokens < len(self.token_ids)
            or list(output.token_ids[: len(self.token_ids)]) != self.token_ids
            or not (output.text or "").startswith(self.said())
        )

    def news_since(self, output: StageOutput, sound_start: int) -> StageOutput:
        """An output with deltas that go on where this one ended.

        Args:
            output: that does not contradict this one.
            sound_start: place of the first sample of its ``audio_delta`` in the whole sound.
        """
        sound = output.audio_delta
        if sound is not None and sound_start < self.num_samples:
            rest = sound.samples[self.num_samples - sound_start :]
            sound = Waveform(rest, sound.sampling_rate) if rest.shape[0] else None
        delta = (output.text or "")[self.num_chars :]
        return with_fields(output, delta=delta, audio_delta=sound)
