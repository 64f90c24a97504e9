"""Window-by-window transcription of a recording.

::

    recording  |<------- window ------->|
    generated  <0.00> a b <1.80> <1.80> c d      ends in the middle of a segment: cut off
    kept       <0.00> a b <1.80> <1.80>
                                |<------- window ------->|       begins at 1.80 s
                                <0.00> c d e <1.50>              speech ended here:
                                                         |<--    the next window follows this one

Timestamps are relative to the beginning of their window. The rules are those of transformers'
sequential long-form transcription with the options of ``TranscriptionOptions``. Text that fails
their quality checks is discarded and generated again as a separate sequence.

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
_HOT_TEMPERATURE = 0.5
"""Text generated at this temperature or above is not used as context for the next window."""


def warp(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the column at which the cheapest path through a table enters each row.

    Dynamic time warping from the first to the last cell, by diagonals; sums are float32 and ties
    are resolved as in transformers.

    Args:
        costs: ``(rows, columns)``, at least one of each.
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
    """Computes the times of tokens and words.

    Attributes:
        filter_width: width of the median filter over adjacent encoder rows; odd.
        languages: names of languages, by token id.
    """

    tokenizer: PreTrainedTokenizerBase
    filter_width: int
    languages: Mapping[int, str]

    def times(self, attention: Tensor, num_rows: int) -> list[float]:
        """Return the end times of tokens in seconds; the last, which no step ran, repeats its time.

        Args:
            attention: ``(heads, tokens except the last, encoder rows)``.
            num_rows: encoder rows that are not padding.
        """
        weights = attention[:, :, : max(1, num_rows)]
        std, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
        weights = _median_filter((weights - mean) / std, self.filter_width).mean(dim=0)
        ends = (warp(-weights.double().numpy()) * _TIMESTAMP_S).tolist()
        return [*ends, ends[-1]]

    def words(
        self, all_ids: Sequence[int], kept: Sequence[int], times: Sequence[float], end: int
    ) -> list[TimedWord]:
        """Return the words between timestamps, whose ids are ``end`` and above.

        Args:
            all_ids: including the prompt, which contains a language.
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
    """Continuation of a transcription after a window; see ``Continuation``.

    Attributes:
        begin: frame at which the current window begins.
        first_timestamp_id: the id of ``<|0.00|>``; all larger ids are later times.
        end_token_id: ends a window's text, without being part of it.
        start_token_id: first token of the prompt, after any previous text.
        previous_id: token that begins previous text; None: previous text is never used.
        prompt_ids: the user's initial prompt: text before the first window.
        previous_ids: last tokens of the text before the current window.
        max_previous: maximum length of ``previous_ids``.
        attempt: number of texts of the window that failed quality checks.
        aligner: None if no word times are requested.
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
    previous_ids: tuple[int, ...] = ()
    max_previous: int = 0
    attempt: int = 0
    is_hot: bool = False
    aligner: Aligner | None = None

    def opening(
        self, prompt_ids: Sequence[int], choice: PromptChoice | None = None
    ) -> tuple[list[int], PromptChoice | None]:
        """See ``Continuation``; the no-speech probability is read at the start token."""
        has_context = self.options.condition_on_prev_tokens and not self.is_hot
        before = self.previous_ids if has_context else self.prompt_ids
        own = list(prompt_ids[prompt_ids.index(self.start_token_id) :])
        if choice is not None:
            # As in transformers, the language is detected without previous text.
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
        if ends or begin >= self.windows.end:  # a stop token of the user ends the transcription
            return Sequel(num_kept, window)
        previous = list(self.previous_ids)
        for segment in segments:  # without the second of two timestamps at the end
            ends_twice = len(segment) > 2 and segment[-2] >= self.first_timestamp_id
            previous += segment[:-1] if ends_twice else segment
        following = replace(
            self,
            begin=begin,
            previous_ids=tuple(previous[-self.max_previous :]),
            attempt=0,
            temperature=temperatures[0] if temperatures else None,
            is_hot=request.params.temperature >= _HOT_TEMPERATURE,
        )
        return Sequel(num_kept, window, self.windows.at(begin), following)

    def _judged(self, request: Request) -> tuple[bool, bool]:
        """Return two flags: the window is silent; its text fails the quality checks."""
        options, is_poor = self.options, False
        if options.compression_ratio_threshold is not None:
            width = int(math.log2(self.vocab_size) / 8) + 1
            content = b"".join(x.to_bytes(width, "little") for x in request.output_token_ids)
            ratio = len(content) / len(zlib.compress(content))
            is_poor = ratio > options.compression_ratio_threshold
        if options.logprob_threshold is None or request.mean_score >= options.logprob_threshold:
            return False, is_poor
        limit = options.no_speech_threshold
        return limit is not None and request.judgements[0].probability > limit, True

    def _window(self, request: Request, num: int, attention: Tensor | None) -> TranscriptionWindow:
        """Build the output's description of a window with ``num`` kept tokens."""
        begin_s = round(self.begin / _FRAMES_PER_TIMESTAMP * _TIMESTAMP_S, 3)
        times: list[float] = []
        words: list[TimedWord] = []
        if self.aligner is not None:
            num_rows = (self.windows.end - self.begin) // _FRAMES_PER_TIMESTAMP
            # There is no attention for a text of one token, which no step has run.
            found = [0.0] if attention is None else self.aligner.times(attention, num_rows)
            times = [round(begin_s + each, 3) for each in found[:num]]
            kept = request.output_token_ids[:num]
            words = self.aligner.words(request.token_ids, kept, times, self.first_timestamp_id)
        judged = request.judgements and self.options.no_speech_threshold is not None
        silence = request.judgements[0].probability if judged else None
        temperature = request.params.temperature
        return TranscriptionWindow(0, begin_s, temperature, silence, tuple(times), tuple(words))

    def _split(self, tokens: Sequence[int], rest: int) -> tuple[list[Sequence[int]], int]:
        """Return the kept segments, and the number of frames that they cover."""
        times = [token >= self.first_timestamp_id for token in tokens]
        pairs = [place for place in range(1, len(times)) if times[place - 1] and times[place]]
        if not pairs or times[-2:] == [False, True]:
            ends, num_frames = [*pairs, len(tokens)], rest
        else:
            ends = [*pairs[:-1], pairs[-1] + 1]
            spoken = tokens[pairs[-1] - 1] - self.first_timestamp_id
            # Always advance, even if a window begins with a pair of timestamps.
            num_frames = spoken * _FRAMES_PER_TIMESTAMP or rest
        return [tokens[begin:end] for begin, end in pairwise([0, *ends])], num_frames
