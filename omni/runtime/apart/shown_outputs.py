"""Outputs of requests on their way to another process, each as it differs from the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine import Waveform
from engine.interface.deferred import Deferred, with_fields
from omni.requests.request import OmniOutput
from omni.runtime.apart.apart_messages import Outputs, Piece, Shown, ShownOutput
from stages import StageOutput
from stages.remote.control import Grown
from stages.remote.growing_output import GrowingOutput, OutputTails
from stages.worker.messages import Moved

__all__ = ["OutputShortener", "ShortOutput", "ShownRequest", "packed", "unpacked"]

ShortOutput: TypeAlias = tuple[ShownOutput, tuple[StageOutput | Grown, ...]]
"""An output of a request, and what of it is no piece."""

_MOST_SOUND = 64 * 2**10
"""Bytes of a piece; what is larger goes through shared memory."""

_PACK = msgspec.msgpack.Encoder()
_UNPACK = msgspec.msgpack.Decoder(tuple[ShownOutput, ...])

_USUAL = {
    "error": None,
    "encoder_prompt_token_ids": None,
    "prompt_token_ids": (),
    "logprobs": None,
    "audio": None,
    "windows": (),
}
"""What a piece leaves out has these values."""


@dataclass(slots=True)
class _Told:
    """What was told of one stage's output of one request.

    Attributes:
        ticket: stands for both.
        last: the output itself.
        sound: the samples of its pieces.
    """

    ticket: int
    last: StageOutput | None = None
    sound: list[Tensor] = field(default_factory=list)


class OutputShortener:
    """Where requests run: leaves out of an output what the ones before it said."""

    def __init__(self) -> None:
        self._tails = OutputTails()
        self._told: dict[int, dict[str, _Told]] = {}
        self._num_tickets = 0

    def shorten(self, number: int, output: OmniOutput) -> ShortOutput:
        """What is to be sent.

        Args:
            number: of the request.
            output: its next one.
        """
        stages: dict[str, Piece | int | None] = {}
        beside: list[StageOutput | Grown] = []
        for name, each in output.stages.items():
            shown = self._shortened(self._told_of(number, name), each)
            if isinstance(shown, StageOutput | Grown):
                stages[name] = len(beside)
                beside.append(shown)
            else:
                stages[name] = shown
        if output.finished:
            self.forget(number)
        about = (output.finished, output.error, output.refused, output.timeline)
        return ShownOutput(number, stages, *about), tuple(beside)

    def forget(self, number: int) -> None:
        """A request has ended, or nobody waits for it."""
        for told in self._told.pop(number, {}).values():
            self._tails.forget(told.ticket)

    def _told_of(self, number: int, stage: str) -> _Told:
        told = self._told.setdefault(number, {})
        if stage not in told:
            self._num_tickets += 1
            told[stage] = _Told(self._num_tickets)
        return told[stage]

    def _shortened(self, told: _Told, output: StageOutput) -> Shown:
        last, told.last = told.last, output
        if _is_as_before(last, output):
            return None
        if output.audio_delta is not None:
            told.sound.append(output.audio_delta.samples)
        if output.finished:
            return _sound_of(told, output) or output
        short = self._tails.shorten(Moved(told.ticket, output))
        assert isinstance(short, Grown), "it is not finished"
        piece = None if short.num_completions > 1 else _piece(short.output)
        if piece is None:
            return short
        return msgspec.structs.replace(
            piece, has_text=short.has_text, num_completions=short.num_completions
        )


@dataclass(slots=True)
class ShownRequest:
    """Where outputs arrive: what has been said of one request so far.

    Attributes:
        request_id: of the request.
        stages: the outputs of its stages as they were last.
    """

    request_id: str
    stages: Mapping[str, StageOutput] = field(default_factory=dict)
    _growing: dict[str, GrowingOutput] = field(default_factory=dict)
    _sound: dict[str, list[Tensor]] = field(default_factory=dict)

    def whole(self, short: ShortOutput) -> OmniOutput:
        """The output that was shortened."""
        shown, beside = short
        if shown.error is not None and not shown.stages:  # then there is what there was
            return replace(self.ended(shown.error), refused=shown.refused, timeline=shown.timeline)
        self.stages = {
            name: self._whole(name, beside[each] if isinstance(each, int) else each)
            for name, each in shown.stages.items()
        }
        return OmniOutput(
            self.request_id, self.stages, shown.finished, shown.error, shown.refused, shown.timeline
        )

    def ended(self, error: str) -> OmniOutput:
        """A last output with what there was."""
        stages = {name: _quiet(each) for name, each in self.stages.items()}
        return OmniOutput(self.request_id, stages, finished=True, error=error)

    def _whole(self, name: str, shown: Shown) -> StageOutput:
        if shown is None:
            return _quiet(self.stages[name])
        if isinstance(shown, Piece):
            output = self._put_together(name, shown)
        elif isinstance(shown, Grown):
            output = self._growing.setdefault(name, GrowingOutput()).grow(shown)
        else:
            output = shown
        if output.audio_delta is not None and not output.finished:
            self._sound.setdefault(name, []).append(output.audio_delta.samples)
        return output

    def _put_together(self, name: str, piece: Piece) -> StageOutput:
        delta = None
        if piece.sound is not None:
            samples = np.frombuffer(bytearray(piece.sound), dtype=np.float32)  # may be written to
            delta = Waveform(torch.from_numpy(samples), piece.sampling_rate)
        output = StageOutput(
            self.request_id,
            name,
            piece.finished,
            delta=piece.delta,
            token_ids=piece.token_ids,
            finish_reason=piece.finish_reason,
            num_prompt_tokens=piece.num_prompt_tokens,
            num_cached_tokens=piece.num_cached_tokens,
            metrics=piece.metrics,
            audio_delta=delta,
        )
        if piece.finished:
            pieces = [*self._sound.pop(name, ()), *([] if delta is None else [delta.samples])]
            return with_fields(output, audio=Waveform(torch.cat(pieces), piece.sampling_rate))
        grown = Grown(0, output, piece.has_text, piece.num_completions)
        return self._growing.setdefault(name, GrowingOutput()).grow(grown)


def packed(outputs: Sequence[ShortOutput]) -> Outputs:
    """Outputs as one message."""
    return Outputs(_PACK.encode([each[0] for each in outputs]), tuple(each[1] for each in outputs))


def unpacked(message: Outputs) -> Iterator[ShortOutput]:
    """What was packed.

    Raises:
        ValueError: it is something else.
    """
    try:
        shown = _UNPACK.decode(message.packed)
    except msgspec.MsgspecError as error:
        raise ValueError(f"outputs that cannot be read: {error}") from error
    return zip(shown, message.beside, strict=True)


def _sound_of(told: _Told, output: StageOutput) -> Piece | None:
    """The last piece of a stage that only makes sound; None if that, or the whole, is not usual."""
    audio = output.audio
    if audio is None or not told.sound or output.text is not None or output.token_ids:
        return None
    whole = torch.cat(told.sound)
    if whole.shape != audio.samples.shape or not torch.equal(whole, audio.samples):
        return None
    if output.completions:
        return None
    piece = _piece(with_fields(output, audio=None))
    return piece and msgspec.structs.replace(piece, sampling_rate=audio.sampling_rate)


def _piece(output: StageOutput) -> Piece | None:
    """An output as a piece; None if it has more to tell than pieces do."""
    fields = output.__dict__
    if output.tensors or any(fields[name] != usual for name, usual in _USUAL.items()):
        return None
    delta = output.audio_delta
    sound, sampling_rate = None, 0
    if delta is not None:
        samples = delta.samples
        if samples.dtype != torch.float32 or samples.nbytes > _MOST_SOUND or samples.ndim != 1:
            return None
        sound, sampling_rate = samples.contiguous().numpy().tobytes(), delta.sampling_rate
    return Piece(
        output.finished,
        output.delta,
        output.token_ids,
        False,
        0,
        output.finish_reason,
        output.num_prompt_tokens,
        output.num_cached_tokens,
        output.metrics,
        sound,
        sampling_rate,
    )


def _is_as_before(last: StageOutput | None, output: StageOutput) -> bool:
    """Whether nothing but deltas differs, of which there are none any more."""
    if last is None or output.delta or output.audio_delta is not None:
        return False
    before, now = last.__dict__, output.__dict__
    return last is output or all(
        before[name] is value or _made(before[name]) is _made(value)
        for name, value in now.items()
        if name not in ("delta", "audio_delta")
    )


def _made(value: object) -> object:
    """A field's value, which one of two copies may have made already."""
    return value.value if isinstance(value, Deferred) else value


def _quiet(output: StageOutput) -> StageOutput:
    """The same, which tells nothing new."""
    if not output.delta and output.audio_delta is None:
        return output
    return with_fields(output, delta="", audio_delta=None)
