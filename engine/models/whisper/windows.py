"""A recording is transcribed a window at a time.

::

    recording  |<------- window ------->|
    written    <0.00> a b <1.80> <1.80> c d      ends in the middle of what is said: cut off
    kept       <0.00> a b <1.80> <1.80>
                                |<------- window ------->|       begins at 1.80 s
                                <0.00> c d e <1.50>              says where the speech ended:
                                                         |<--    the next begins behind it

Timestamps count from the beginning of their window. The rules are those of transformers' sequential
long-form transcription with the options of ``TranscriptionOptions``. A text that they find poor is
written once more, as a sequence of its own, and no sign of it is left in the output.

Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022, section
3.8; transformers' ``generation_whisper``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.models.whisper.generation_whisper import _median_filter
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from engine.inputs.encoder_decoder_inputs import InputWindows
from engine.interface.outputs import FinishReason, TimedWord, TranscriptionWindow
from engine.interface.prompts import TranscriptionOptions
from engine.requests.encoder_input import PromptChoice
from engine.requests.request import Continuation, Request, Sequel

_FRAMES_PER_TIMESTAMP = 2
_TIMESTAMP_S = 0.02
_HOT = 0.5
"""Text that was written at this temperature, or above, is none to go on from."""


def warp(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Where the cheapest way through a table, from its first to its last cell, enters each row.

    Dynamic time warping, a diagonal at a time, with the sums in float32 and the choice between
    equal ones as in transformers.

    Args:
        costs: ``(rows, columns)``, one at least of both.
    """
    num_rows, num_columns = costs.shape
    sums = np.full((num_rows + 1, num_columns + 1), np.inf, dtype=np.float32)
    steps = np.zeros(sums.shape, dtype=np.int8)
    sums[0, 0] = 0
    for diagonal in range(2, num_rows + num_columns + 1):
        i = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        j = diagonal - i
        before = both, down, right = sums[i - 1, j - 1], sums[i - 1, j], sums[i, j - 1]
        step = np.where((down < both) & (down < right), 1, 2)
        step[(both < down) & (both < right)] = 0
        steps[i, j], sums[i, j] = step, costs[i - 1, j - 1] + np.choose(step, before)
    row, column, entered = num_rows, num_columns, np.zeros(num_rows, dtype=np.int64)
    while row:
        entered[row - 1] = column - 1
        step = steps[row, column]
        row, column = row - (step != 2), column - (step != 1)
    return entered


@dataclass(frozen=True, slots=True, eq=False)
class Aligner:
    """Says when tokens and words are spoken.

    Attributes:
        filter_width: of a median over encoder rows that are next to each other; odd.
        languages: their names, by the ids of their tokens.
    """

    tokenizer: PreTrainedTokenizerBase
    filter_width: int
    languages: Mapping[int, str]

    def times(self, attention: Tensor, num_rows: int) -> list[float]:
        """When tokens end, in seconds: the last, which no step has run, with the one before it.

        Args:
            attention: ``(heads, tokens but the last, encoder rows)``.
            num_rows: rows of the encoder that are no padding.
        """
        weights = attention[:, :, : max(1, num_rows)]
        std, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
        weights = _median_filter((weights - mean) / std, self.filter_width).mean(dim=0)
        ends = (warp(-weights.double().numpy()) * _TIMESTAMP_S).tolist()
        return [*ends, ends[-1]]

    def words(
        self, all_ids: Sequence[int], kept: Sequence[int], times: Sequence[float], end: int
    ) -> list[TimedWord]:
        """The words between timestamps, whose ids are ``end`` and above.

        Args:
            all_ids: with the prompt, which names a language.
        """
        special = set(self.tokenizer.all_special_ids)
        language = next((self.languages[x] for x in all_ids if x in self.languages), "english")
        found: list[TimedWord] = []
        place = 0
        for is_text, group in groupby(kept, lambda each: each < end and each not in special):
            run = list(group)
            words, _, indices = _combine_tokens_into_words(self.tokenizer, run, language)
            for word, within in zip(words, indices, strict=True) if is_text else ():
                first, last = place + within[0], place + within[-1]
                found.append(TimedWord(word, times[max(0, first - 1)], times[last]))
            place += len(run)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpeechWindows(Continuation):
    """How a transcription goes on after a window; see ``Continuation``.

    Attributes:
        begin: frame at which the present window begins.
        first_timestamp_id: the id of ``<|0.00|>``; all larger ids are later times.
        end_token_id: ends a window's text, and is no part of it.
        start_token_id: where the prompt begins; what was said before stands before it.
        previous_id: begins what was said before; None where nothing ever is.
        prompt_ids: what was said before the first window, as the user has it.
        said: the last tokens of what was said before the present one.
        most_said: so many of them.
        attempt: how many texts of the window were poor.
        aligner: None if no times are asked for.
    """

    windows: InputWindows
    begin: int
    options: TranscriptionOptions
    first_timestamp_id: int
    end_token_id: int
    start_token_id: int
    vocab_size: int
    previous_id: int | None = None
    prompt_ids: tuple[int, ...] = ()
    said: tuple[int, ...] = ()
    most_said: int = 0
    attempt: int = 0
    is_hot: bool = False
    aligner: Aligner | None = None

    def opening(
        self, prompt_ids: Sequence[int], choice: PromptChoice | None = None
    ) -> tuple[list[int], PromptChoice | None]:
        """See ``Continuation``: silence is judged at the start token."""
        goes_on = self.options.condition_on_prev_tokens and not self.is_hot
        before = self.said if goes_on else self.prompt_ids
        own = list(prompt_ids[prompt_ids.index(self.start_token_id) :])
        if choice is not None:
            # As in transformers, the language is found out without what was said before.
            found = choice.candidates, choice.then
            return own, PromptChoice(*found, judged_id=self.judged_id, is_alone=bool(before))
        if before and self.previous_id is not None:
            own = [self.previous_id, *before, *own]
        start = own.index(self.start_token_id) + 1
        if self.options.no_speech_threshold is None or start == len(own):
            return own, None
        known = own[start : start + 1], own[start + 1 :]
        return own[:start], PromptChoice(*known, judged_id=self.judged_id)

    def follow(self, request: Request, reason: FinishReason, attention: Tensor | None) -> Sequel:
        """See ``Continuation``."""
        tokens, temperatures = list(request.output_token_ids), self.options.temperature or ()
        is_silent, is_poor = self._judged(request)
        if is_poor and not is_silent and self.attempt + 1 < len(temperatures):
            attempt = self.attempt + 1
            again = replace(self, attempt=attempt, temperature=temperatures[attempt])
            return Sequel(0, None, self.windows.at(self.begin), again)
        ends = reason is FinishReason.STOP and tokens[-1] != self.end_token_id
        if reason is FinishReason.STOP and not ends:
            tokens.pop()
        rest = min(self.windows.window, self.windows.num_frames - self.begin)
        segments, num_frames = self._split(tokens, rest)
        if is_silent:
            segments, num_frames = [], rest
        num_kept = len(tokens) if ends else sum(map(len, segments))
        window = self._window(request, num_kept, attention)
        begin = self.windows.next_begin(self.begin + num_frames)
        if ends or begin >= self.windows.end:  # a stop token of the user's ends all of it
            return Sequel(num_kept, window)
        said = list(self.said)
        for segment in segments:  # without the second of two timestamps at its end
            ends_twice = len(segment) > 2 and segment[-2] >= self.first_timestamp_id
            said += segment[:-1] if ends_twice else segment
        following = replace(
            self,
            begin=begin,
            said=tuple(said[-self.most_said :]),
            attempt=0,
            temperature=temperatures[0] if temperatures else None,
            is_hot=request.params.temperature >= _HOT,
        )
        return Sequel(num_kept, window, self.windows.at(begin), following)

    def _judged(self, request: Request) -> tuple[bool, bool]:
        """Whether a window is silent, and whether its text is poor."""
        options, is_poor = self.options, False
        if options.compression_ratio_threshold is not None:
            width = int(math.log2(self.vocab_size) / 8) + 1
            content = b"".join(x.to_bytes(width, "little") for x in request.output_token_ids)
            ratio = len(content) / len(zlib.compress(content))
            is_poor = ratio > options.compression_ratio_threshold
        if options.logprob_threshold is None or request.mean_score >= options.logprob_threshold:
            return False, is_poor
        most = options.no_speech_threshold
        return most is not None and request.judgements[0].probability > most, True

    def _window(self, request: Request, num: int, attention: Tensor | None) -> TranscriptionWindow:
        """What the output says of a window, of whose tokens ``num`` are kept."""
        begin_s = round(self.begin / _FRAMES_PER_TIMESTAMP * _TIMESTAMP_S, 3)
        times: list[float] = []
        words: list[TimedWord] = []
        if self.aligner is not None:
            num_rows = (self.windows.end - self.begin) // _FRAMES_PER_TIMESTAMP
            # A text of one token, which no step has run, has none.
            found = [0.0] if attention is None else self.aligner.times(attention, num_rows)
            times = [round(begin_s + each, 3) for each in found[:num]]
            kept = request.output_token_ids[:num]
            words = self.aligner.words(request.token_ids, kept, times, self.first_timestamp_id)
        judged = request.judgements and self.options.no_speech_threshold is not None
        silence = request.judgements[0].probability if judged else None
        temperature = request.params.temperature
        return TranscriptionWindow(0, begin_s, temperature, silence, tuple(times), tuple(words))

    def _split(self, tokens: Sequence[int], rest: int) -> tuple[list[Sequence[int]], int]:
        """The segments that are kept, and how many frames they tell of."""
        times = [token >= self.first_timestamp_id for token in tokens]
        pairs = [place for place in range(1, len(times)) if times[place - 1] and times[place]]
        if not pairs or times[-2:] == [False, True]:
            ends, num_frames = [*pairs, len(tokens)], rest
        else:
            ends = [*pairs[:-1], pairs[-1] + 1]
            spoken = tokens[pairs[-1] - 1] - self.first_timestamp_id
            # Always ahead, also where a window had to begin with a pair.
            num_frames = spoken * _FRAMES_PER_TIMESTAMP or rest
        return [tokens[begin:end] for begin, end in pairwise([0, *ends])], num_frames
