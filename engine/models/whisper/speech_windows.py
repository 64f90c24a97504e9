"""Transcribes a recording that is longer than Whisper's window, a window at a time.

::

    recording  |<------- window ------->|
    written    <0.00> a b <1.80> <1.80> c d      ends in the middle of what is said: cut off
    kept       <0.00> a b <1.80> <1.80>
                                |<------- window ------->|       begins at 1.80 s
                                <0.00> c d e <1.50>              says where the speech ended:
                                                         |<--    the next begins behind it

Timestamps count from the beginning of their window. The rules are those of transformers' sequential
long-form transcription, as ``generate`` does it without being asked for more: no window sees the
text of another, and none is written again at another temperature.

Source: Radford et al. 2022, section 3.8; transformers' ``generation_whisper``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.inputs.input_windows import InputWindows
from engine.interface.outputs import FinishReason
from engine.requests.continuation import Sequel

__all__ = ["SpeechWindows"]

_FRAMES_PER_TIMESTAMP = 2
_TIMESTAMP_S = 0.02


@dataclass(frozen=True, slots=True)
class SpeechWindows:
    """How a transcription goes on after a window; see ``Continuation``.

    Attributes:
        windows: of the recording.
        begin: frame at which the present window begins.
        first_timestamp_id: the id of ``<|0.00|>``; all larger ids are later times.
        end_token_id: ends a window's text, and is no part of it.
    """

    windows: InputWindows
    begin: int
    first_timestamp_id: int
    end_token_id: int

    @property
    def begin_s(self) -> float:
        """See ``Continuation``."""
        return round(self.begin / _FRAMES_PER_TIMESTAMP * _TIMESTAMP_S, 3)

    def follow(self, generated: Sequence[int], reason: FinishReason) -> Sequel:
        """See ``Continuation``."""
        tokens = list(generated)
        if reason is FinishReason.STOP:
            if tokens[-1] != self.end_token_id:
                return Sequel(len(tokens))  # a stop token of the user's ends all of it
            tokens.pop()
        num_kept, num_frames = self._split(tokens)
        begin = self.begin + num_frames
        if begin >= self.windows.num_frames:
            return Sequel(num_kept)
        return Sequel(num_kept, self.windows.at(begin), replace(self, begin=begin))

    def _split(self, tokens: Sequence[int]) -> tuple[int, int]:
        """How many tokens are kept, and how many frames they tell of."""
        times = [token >= self.first_timestamp_id for token in tokens]
        pairs = [place for place in range(1, len(times)) if times[place - 1] and times[place]]
        rest = min(self.windows.window, self.windows.num_frames - self.begin)
        if not pairs or times[-2:] == [False, True]:
            return len(tokens), rest
        told = tokens[pairs[-1] - 1] - self.first_timestamp_id
        # Always ahead, also where a window was told to begin with a pair.
        return pairs[-1] + 1, told * _FRAMES_PER_TIMESTAMP or rest
