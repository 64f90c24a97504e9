"""Whisper: an encoder over the spectrogram of a window of fixed length, learned positions.

A recording that is longer than the window is transcribed a window at a time::

    recording  |<------- window ------->|
    written    <0.00> a b <1.80> <1.80> c d      ends in the middle of what is said: cut off
    kept       <0.00> a b <1.80> <1.80>
                                |<------- window ------->|       begins at 1.80 s
                                <0.00> c d e <1.50>              says where the speech ended:
                                                         |<--    the next begins behind it

Timestamps count from the beginning of their window. The rules are those of transformers' sequential
long-form transcription, as ``generate`` does it without being asked for more: no window sees the
text of another, and none is written again at another temperature.

Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022, section
3.8; transformers' ``generation_whisper``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.models.whisper.modeling_whisper import WhisperEncoder
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.encoder_decoder_inputs import (
    AudioEncoderInputs,
    DecoderPromptRule,
    EncoderDecoderPromptProcessor,
    InputWindows,
)
from engine.inputs.prompt_processor import PromptSources
from engine.inputs.prompt_tokens import WrittenPrompt, tokenize
from engine.interface.outputs import FinishReason
from engine.interface.prompts import AudioPrompt, DecoderPrompt, EncoderPrompt
from engine.media.sound_file import load_extractor
from engine.models.base import ModelSettings
from engine.models.encoder_module import EncoderModule, build_empty
from engine.models.family import ModelFamily
from engine.models.seq2seq.seq2seq import FAIRSEQ_NAMES, Seq2SeqConfig, Seq2SeqModel
from engine.requests.encoder_input import Continuation, EncoderInput, PromptChoice, Sequel
from engine.sampling.sampler import LogitsProcessor

_FRAMES_PER_TIMESTAMP = 2
_TIMESTAMP_S = 0.02


@dataclass(frozen=True, slots=True)
class SpeechWindows:
    """How a transcription goes on after a window; see ``Continuation``.

    Attributes:
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
        begin = self.windows.next_begin(self.begin + num_frames)
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
        spoken = tokens[pairs[-1] - 1] - self.first_timestamp_id
        # Always ahead, also where a window had to begin with a pair.
        return pairs[-1] + 1, spoken * _FRAMES_PER_TIMESTAMP or rest


class TimestampRule:
    """Keeps timestamps in order and in pairs: one where a segment begins, one where it ends.

    ::

        <|0.00|> text text <|1.20|> <|1.20|> text ... <|2.00|> <end>
         first token, and    end and next begin: only text follows a pair,
         not too late        only a timestamp or the end follows a single one

    Beside that, a timestamp is written wherever all timestamps together are likelier than the
    likeliest text. It is transformers' own processor that masks, over the generated ids alone.

    Args:
        no_timestamps_token_id: the last id before those of the timestamps; never generated.
        max_first: the latest that the first timestamp may be, as its number; None for any.
    """

    def __init__(
        self, no_timestamps_token_id: int, end_token_id: int, max_first: int | None = None
    ) -> None:
        # What the processor looks up in a generation config, where an end may also be a list.
        config: Any = SimpleNamespace(
            no_timestamps_token_id=no_timestamps_token_id,
            eos_token_id=end_token_id,
            bos_token_id=end_token_id,
            max_initial_timestamp_index=max_first,
        )
        self._processor = WhisperTimeStampLogitsProcessor(config, begin_index=0)

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """Mask what must not come next, in place.

        Args:
            logits: ``(vocab,)`` of the next token.
            generated: the ids so far, without the prompt.
        """
        ids = torch.tensor([list(generated)], dtype=torch.int64)
        logits.copy_(self._processor(ids, logits[None])[0])


_WISHES = ("language", "task", "timestamps")


class WhisperPromptRule(DecoderPromptRule):
    """The tokens that say what is wanted, from the request or from the generation config.

    ::

        <|startoftranscript|> <|fr|> <|transcribe|> <|notimestamps|>
         always                multilingual models   unless timestamps are wanted

    They are those of transformers' ``WhisperForConditionalGeneration.generate``. Where no
    language is named, the model itself chooses its token: the likeliest behind the first. Where
    the checkpoint names no task either, it is ``transcribe``: without a task token, which
    ``generate`` leaves out, models write nonsense.
    """

    def prompt_ids(self, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None) -> list[int]:
        """Ids that the decoder goes on from; see :class:`DecoderPromptRule`."""
        if decoder is not None and isinstance(encoder, AudioPrompt):
            wanted = [name for name in _WISHES if getattr(encoder, name) is not None]
            if wanted:
                raise ValueError(
                    f"{' and '.join(wanted)} cannot stand beside a decoder prompt: write the "
                    "tokens into the decoder prompt, or leave it out"
                )
        return super().prompt_ids(encoder, decoder)

    def prompt_choice(
        self, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None
    ) -> PromptChoice | None:
        """The language, where none is named, and what follows it."""
        if decoder is not None:
            return None
        ids, detects = self._plan(encoder)
        if not detects:
            return None
        return PromptChoice(tuple(self._setting("lang_to_id").values()), ids[1:])

    def logits_processor(self, encoder: EncoderPrompt | None) -> LogitsProcessor | None:
        """The order of timestamps, where they are wanted."""
        without = self._setting("no_timestamps_token_id")
        if without is None or not self._wants_timestamps(encoder):
            return None
        end = self._first_named("eos_token_id", "bos_token_id")
        return TimestampRule(without, end, self._setting("max_initial_timestamp_index"))

    def across(
        self, windows: InputWindows, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None
    ) -> tuple[EncoderPrompt | None, Continuation]:
        """Window after window, each from where the text before ended; with timestamps."""
        if decoder is not None or not isinstance(encoder, AudioPrompt):
            raise ValueError(
                "a decoder prompt does not go with a recording that is longer than the model's "
                "window: leave it out, or cut the recording into shorter pieces"
            )
        if encoder.timestamps is False:
            raise ValueError(
                "a recording that is longer than the model's window is cut by its timestamps: "
                "leave timestamps out, or cut the recording into shorter pieces"
            )
        without = self._setting("no_timestamps_token_id")
        asked = replace(encoder, timestamps=True)
        if without is None:
            # Says that there are none.
            self._with_timestamps([self.start_token_id], True)
        end = self._first_named("eos_token_id", "bos_token_id")
        return asked, SpeechWindows(windows, windows.next_begin(0), int(without) + 1, end)

    def _wants_timestamps(self, encoder: EncoderPrompt | None) -> bool:
        asked = encoder.timestamps if isinstance(encoder, AudioPrompt) else None
        return bool(self._setting("return_timestamps") if asked is None else asked)

    @property
    def _first_ids(self) -> tuple[int, ...]:
        # A prompt may begin with what was said before: <|startofprev|> ... <|startoftranscript|>
        previous = self._named("prev_sot_token_id")
        return (self.start_token_id,) if previous is None else (self.start_token_id, previous)

    def _tokenize(self, decoder: WrittenPrompt) -> list[int]:
        """Text as it is: the tokenizer would put its own choice of language and task before it."""
        return tokenize(decoder, self._tokenizer, self._limits, as_it_is=True)

    def _default(self, encoder: EncoderPrompt | None) -> list[int]:
        ids, detects = self._plan(encoder)
        return ids[:1] if detects else ids

    def _plan(self, encoder: EncoderPrompt | None) -> tuple[list[int], bool]:
        """The prompt, and whether a language that the model detects belongs behind its first id."""
        asked = encoder if isinstance(encoder, AudioPrompt) else AudioPrompt("")
        chosen = asked.language is not None or asked.task is not None
        if chosen and self._setting("is_multilingual") is False:
            raise ValueError(
                "this checkpoint knows English only: neither language nor task can be chosen"
            )
        language = asked.language if asked.language is not None else self._setting("language")
        task = asked.task if asked.task is not None else self._setting("task")
        ids: list[int | None] = [self.start_token_id]
        if language is None and task is None:
            ids += self._forced_ids()
        if language is not None:
            ids[1:2] = [self._language_id(language)]
        detects = bool(self._setting("lang_to_id")) and (len(ids) == 1 or ids[1] is None)
        tasks = self._setting("task_to_id") or {}
        if task is not None:
            if task not in tasks:
                raise ValueError(
                    f"task {task!r} is unknown to this checkpoint; it knows "
                    f"{', '.join(sorted(tasks)) or 'none'}"
                )
            ids.append(tasks[task])
        elif (language is not None or detects) and tasks and not set(ids) & set(tasks.values()):
            # Behind the language, whose place may still be empty.
            ids[2:2] = [tasks["transcribe"]]
        wanted = self._wants_timestamps(encoder)
        return self._with_timestamps([i for i in ids if i is not None], wanted), detects

    def _with_timestamps(self, ids: list[int], wanted: bool) -> list[int]:
        without = self._setting("no_timestamps_token_id")
        if without is None:
            if wanted:
                raise ValueError(
                    "timestamps are not to be had: the checkpoint's generation config has no "
                    "no_timestamps_token_id"
                )
            return ids
        if wanted:
            return ids[:-1] if ids[-1] == without else ids
        return ids if ids[-1] == without else [*ids, without]

    def _language_id(self, language: str) -> int:
        known: dict[str, int] = self._setting("lang_to_id") or {}
        name = language.lower()
        token = name if name in known else f"<|{TO_LANGUAGE_CODE.get(name, name)}|>"
        if token not in known:
            codes = ", ".join(sorted(each.strip("<|>") for each in known)) or "none"
            raise ValueError(
                f"language {language!r} is unknown to this checkpoint; it knows {codes}"
            )
        return known[token]

    def _forced_ids(self) -> list[int | None]:
        """What older checkpoints say in the place of a language and a task."""
        forced = self._setting("forced_decoder_ids") or []
        positions = [position for position, _ in forced]
        if positions != list(range(1, len(forced) + 1)):
            raise ValueError(
                f"the checkpoint's forced_decoder_ids {forced} must be for positions 1, 2, ..."
            )
        return [token_id for _, token_id in forced]

    def _setting(self, name: str) -> Any:
        own = getattr(self._generation_config, name, None)
        if own is None and name == "forced_decoder_ids":
            return getattr(self._config, name, None)
        return own


_NAMES = replace(FAIRSEQ_NAMES, head="proj_out.weight", final_norm="layer_norm")
_FEATURES = "input_features"
# Frames of the spectrogram per row: the second convolution takes every second one.
_FRAMES_PER_ROW = 2


class SpeechEncoder(EncoderModule):
    """Spectrograms to hidden states, always of the whole window."""

    def __init__(self, config: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.module = build_empty(WhisperEncoder, config, settings)
        self.max_len = config.max_source_positions
        self.dtype = settings.dtype
        self.feature_shape = (config.num_mel_bins, self.max_len * _FRAMES_PER_ROW)

    def check_input(self, entry: EncoderInput) -> None:
        """One spectrogram, padded or cut to the window."""
        features = entry.features.get(_FEATURES)
        if features is None or entry.token_ids:
            raise ValueError(f"Whisper's encoder takes {_FEATURES} (a spectrogram) and no tokens")
        if tuple(features.shape) != self.feature_shape:
            raise ValueError(
                f"{_FEATURES} must be {self.feature_shape} (mel bins, frames), "
                f"got {tuple(features.shape)}"
            )
        self.check_num_tokens(entry, self.max_len)

    def forward(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """See :meth:`EncoderModule.forward`."""
        features = self.stacked_feature(inputs, _FEATURES).to(self.dtype)
        rows: Tensor = self.module(features).last_hidden_state.flatten(0, 1)
        return rows


def whisper_config(config: PreTrainedConfig) -> Seq2SeqConfig:
    """The decoder's part of a config."""
    query, _, value, output = _NAMES.projections
    return Seq2SeqConfig.of_fairseq(
        config,
        config.max_target_positions,
        config.max_source_positions,
        norm_first=True,
        projection_biases=(query, value, output),
        position_offset=0,
        names=_NAMES,
    )


def build_whisper(checkpoint: Checkpoint, settings: ModelSettings) -> Seq2SeqModel:
    """Build a Whisper, its weights not yet loaded; see :class:`Seq2SeqModel`."""
    config = checkpoint.config
    return Seq2SeqModel(
        whisper_config(config),
        lambda _: SpeechEncoder(config, settings),
        settings,
        checkpoint.weight_files,
    )


def _speech_inputs(sources: PromptSources) -> AudioEncoderInputs:
    path, trust = sources.checkpoint.path, sources.checkpoint.trust_remote_code
    extractor = load_extractor(path, trust_remote_code=trust)
    return AudioEncoderInputs(sources.model, extractor, sources.media_limits, vad=sources.vad)


FAMILY = ModelFamily(
    "whisper",
    ("WhisperForConditionalGeneration",),
    build=build_whisper,
    prompts=partial(
        EncoderDecoderPromptProcessor, encoder_inputs=_speech_inputs, decoder_rule=WhisperPromptRule
    ),
    max_positions=lambda config: whisper_config(config).max_position_embeddings,
)
