"""An independent recognizer for the answers' sound: pocketsphinx, with its built-in model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import soxr
from pocketsphinx import Decoder
from torch import Tensor

from training.spoken_sums.answers import SAMPLING_RATE, answer_texts

_HEARD_AT = 16_000
_QUIET = 0.3
_NOISE = 1e-3
_TEENS = range(13, 20)
_TENS = range(30, 100, 10)
HARD_NUMBERS = (*_TEENS, *_TENS, *(100 + teen for teen in _TEENS), 15, 50, 60, 16)
"""Numbers that are confused most, such as thirteen and thirty."""


class Recognizer:
    """Recognizes one of the answers in a sound: numbers from 0 to 200, or the one sentence.

    Its grammar lists the answers; the result is one of them or empty.
    """

    def __init__(self) -> None:
        said = " | ".join(answer_texts())
        grammar = f"#JSGF V1.0;\ngrammar answers;\npublic <answer> = {said};\n"
        self._decoder = Decoder(samprate=_HEARD_AT, lm=None, loglevel="FATAL")
        self._decoder.add_jsgf_string("answers", grammar)
        self._decoder.activate_search("answers")

    def hear(self, samples: Tensor) -> str:
        """Return the answer in samples at 24 kHz ``(n,)``; empty if nothing matches."""
        sound = soxr.resample(samples.detach().double().numpy(), SAMPLING_RATE, _HEARD_AT)
        generator = np.random.default_rng(0)
        quiet = round(_QUIET * _HEARD_AT)
        sound = np.pad(sound, quiet) + generator.normal(0, _NOISE, len(sound) + 2 * quiet)
        pieces = (np.clip(sound, -1, 1) * 32767).astype(np.int16)
        self._decoder.start_utt()
        self._decoder.process_raw(pieces.tobytes(), full_utt=True)
        self._decoder.end_utt()
        heard = self._decoder.hyp()
        return heard.hypstr.strip() if heard is not None else ""

    def share_understood(self, texts: Sequence[str], sounds: Sequence[Tensor]) -> float:
        """Return the share of sounds recognized as their texts, from 0 to 1."""
        heard = [self.hear(sound) for sound in sounds]
        return sum(map(str.__eq__, heard, texts)) / len(texts)
