"""Whisper: an encoder-decoder over spectrograms of fixed-length windows, with learned positions.

Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022;
transformers' ``generation_whisper``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.models.whisper.modeling_whisper import WhisperEncoder
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.encoder_decoder_inputs import (
    AudioEncoderInputs,
    DecoderPromptRule,
    EncoderDecoderPromptProcessor,
    InputWindows,
)
from engine.inputs.prompt_tokens import WrittenPrompt, tokenize
from engine.interface.prompts import (
    AudioPrompt,
    DecoderPrompt,
    EncoderPrompt,
    TextPrompt,
    TranscriptionOptions,
)
from engine.models.base import ModelSettings
from engine.models.encoder_module import EncoderModule, build_empty
from engine.models.seq2seq.seq2seq import FAIRSEQ_NAMES, Seq2SeqConfig, Seq2SeqModel
from engine.models.whisper.windows import Aligner, SpeechWindows
from engine.requests.encoder_input import EncoderInput, PromptChoice
from engine.requests.request import Continuation
from engine.sampling.sampler import LogitsProcessor


class TimestampRule:
    """Keeps timestamps ordered and paired: one at the beginning and one at the end of a segment.

    ::

        <|0.00|> text text <|1.20|> <|1.20|> text ... <|2.00|> <end>
         first token, and    end and next begin: only text follows a pair,
         not too late        only a timestamp or the end follows a single one

    In addition, a timestamp is generated whenever all timestamps together are more probable than
    the most probable text token. transformers' own processor masks, given only the generated ids.

    Args:
        no_timestamps_token_id: the last id before those of the timestamps; never generated.
        max_first: maximum index of the first timestamp; None: no limit.
    """

    def __init__(
        self, no_timestamps_token_id: int, end_token_id: int, max_first: int | None = None
    ) -> None:
        # The fields that the processor reads from a generation config, where eos may be a list.
        config: Any = SimpleNamespace(
            no_timestamps_token_id=no_timestamps_token_id,
            eos_token_id=end_token_id,
            bos_token_id=end_token_id,
            max_initial_timestamp_index=max_first,
        )
        self._processor = WhisperTimeStampLogitsProcessor(config, begin_index=0)

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """Mask invalid next tokens in place.

        Args:
            logits: ``(vocab,)`` of the next token.
            generated: ids generated so far, without the prompt.
        """
        ids = torch.tensor([list(generated)], dtype=torch.int64)
        logits.copy_(self._processor(ids, logits[None])[0])


_REQUEST_OPTIONS = ("language", "task", "timestamps", "transcription")
_CHECKPOINT_OPTIONS = (
    "compression_ratio_threshold",
    "logprob_threshold",
    "no_speech_threshold",
    "condition_on_prev_tokens",
)
"""Options that may be set in a generation config."""
_MAX_INITIAL_TOKENS = 4
"""Maximum number of tokens that end a window's prompt: start, language, task, no timestamps."""


class WhisperPromptRule(DecoderPromptRule):
    """Decoder prompts that select language, task and timestamps, by request or generation config.

    ::

        <|startoftranscript|> <|fr|> <|transcribe|> <|notimestamps|>
         always                multilingual models   unless timestamps are requested

    They match transformers' ``WhisperForConditionalGeneration.generate``. If no language is given,
    the model detects it: the most probable language token after the first. If the checkpoint sets
    no task either, it is ``transcribe``: without a task token, as in ``generate``, models write
    nonsense.
    """

    def resolved(
        self, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None
    ) -> EncoderPrompt | None:
        """Fill in a recording's options from the request, the engine and the checkpoint."""
        if not isinstance(encoder, AudioPrompt):
            return encoder
        if decoder is not None:
            wanted = [name for name in _REQUEST_OPTIONS if getattr(encoder, name) is not None]
            if wanted:
                raise ValueError(
                    f"{' and '.join(wanted)} cannot stand beside a decoder prompt: write the "
                    "tokens into the decoder prompt, or leave it out"
                )
            return encoder
        stated = TranscriptionOptions(**{name: self._setting(name) for name in _CHECKPOINT_OPTIONS})
        own = (encoder.transcription or TranscriptionOptions()).with_defaults(self._options.given)
        timed = self._wants_timestamps(encoder) or encoder.timestamps
        return replace(encoder, timestamps=timed, transcription=own.with_defaults(stated.given))

    def prompt_choice(
        self, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None
    ) -> PromptChoice | None:
        """Return the candidate languages if none is given, and the ids that follow."""
        if decoder is not None:
            return None
        ids, detects = self._plan(encoder)
        if not detects:
            return None
        return PromptChoice(tuple(self._setting("lang_to_id").values()), ids[1:])

    def logits_processor(self, encoder: EncoderPrompt | None) -> LogitsProcessor | None:
        """Return the rule for timestamps, if they are requested."""
        no_timestamps_id = self._setting("no_timestamps_token_id")
        if no_timestamps_id is None or not self._wants_timestamps(encoder):
            return None
        end = self._first_named("eos_token_id", "bos_token_id")
        return TimestampRule(no_timestamps_id, end, self._setting("max_initial_timestamp_index"))

    def across(
        self, windows: InputWindows, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None
    ) -> tuple[EncoderPrompt | None, Continuation]:
        """Return prompt and continuation of a transcription by windows, which uses timestamps."""
        is_long = windows.num_frames > windows.window
        if decoder is not None or not isinstance(encoder, AudioPrompt):
            raise ValueError(
                "a decoder prompt does not go with a recording that is longer than the model's "
                "window: leave it out, or cut the recording into shorter pieces"
            )
        if is_long and encoder.timestamps is False:
            raise ValueError(
                "a recording that is longer than the model's window is cut by its timestamps: "
                "leave timestamps out, or cut the recording into shorter pieces"
            )
        no_timestamps_id = self._setting("no_timestamps_token_id")
        prompt = replace(encoder, timestamps=True) if is_long else encoder
        self._with_timestamps([self.start_token_id], is_long)  # raises if there are none
        options = encoder.transcription or TranscriptionOptions()
        limit = self._limits.max_model_len // 2 - 1
        prompt_ids = () if options.prompt is None else self._prompt_tokens(options.prompt, limit)
        previous, longest = self._named("prev_sot_token_id"), 0
        if options.condition_on_prev_tokens or prompt_ids:
            self._check_named("prompt and condition_on_prev_tokens", prev_sot_token_id=previous)
            longest = limit if options.condition_on_prev_tokens else len(prompt_ids)
            longest += 1 + _MAX_INITIAL_TOKENS
        if options.no_speech_threshold is not None:
            self._check_named("no_speech_threshold", no_timestamps_token_id=no_timestamps_id)
            if options.logprob_threshold is None:
                raise ValueError(
                    "no_speech_threshold needs a logprob_threshold: silence is what is likely to "
                    "be without speech and has an unlikely text"
                )
        vocab_size = self._limits.vocab_size
        return prompt, SpeechWindows(
            windows=windows,
            begin=windows.next_begin(0),
            options=options,
            temperature=(options.temperature or (None,))[0],
            # The no-speech token directly precedes the no-timestamps token.
            judged_id=None if options.logprob_threshold is None else (no_timestamps_id or 1) - 1,
            is_aligned=bool(options.return_token_timestamps),
            longest_prompt=longest,
            first_timestamp_id=vocab_size if no_timestamps_id is None else no_timestamps_id + 1,
            end_token_id=self._first_named("eos_token_id", "bos_token_id"),
            start_token_id=self.start_token_id,
            vocab_size=vocab_size,
            previous_id=previous,
            prompt_ids=prompt_ids,
            previous_ids=prompt_ids,
            max_previous=limit,
            aligner=self._aligner() if options.return_token_timestamps else None,
        )

    @staticmethod
    def _check_named(option: str, **found: object) -> None:
        for name, value in found.items():
            if value is None:
                raise ValueError(f"{option}: the checkpoint's generation config has no {name}")

    def _prompt_tokens(self, text: str, limit: int) -> tuple[int, ...]:
        """Return the last tokens of an initial prompt, as transformers' ``get_prompt_ids``."""
        written = TextPrompt(f" {text.strip()}", add_special_tokens=False)
        ids = tokenize(written, self._tokenizer, self._limits, as_it_is=True)
        added = {} if self._tokenizer is None else self._tokenizer.get_added_vocab()
        if not set(ids).isdisjoint(added.values()):
            raise ValueError(f"prompt must be text without special tokens, got {text!r:.80}")
        return tuple(ids[-limit:])

    def _aligner(self) -> Aligner:
        heads, tokenizer = self._setting("alignment_heads"), self._tokenizer
        self._check_named("return_token_timestamps", alignment_heads=heads)
        if tokenizer is None:
            raise ValueError("return_token_timestamps: the checkpoint has no tokenizer")
        ids: dict[str, int] = self._setting("lang_to_id") or {}
        names = {token_id: LANGUAGES.get(name[2:-2], "") for name, token_id in ids.items()}
        return Aligner(tokenizer, self._config.median_filter_width, names)

    def _wants_timestamps(self, encoder: EncoderPrompt | None) -> bool:
        requested = encoder.timestamps if isinstance(encoder, AudioPrompt) else None
        return bool(self._setting("return_timestamps") if requested is None else requested)

    @property
    def _first_ids(self) -> tuple[int, ...]:
        # A prompt may begin with previous text: <|startofprev|> ... <|startoftranscript|>
        previous = self._named("prev_sot_token_id")
        return (self.start_token_id,) if previous is None else (self.start_token_id, previous)

    def _tokenize(self, decoder: WrittenPrompt) -> list[int]:
        """Tokenize text unchanged: the tokenizer would prepend its own language and task."""
        return tokenize(decoder, self._tokenizer, self._limits, as_it_is=True)

    def _default(self, encoder: EncoderPrompt | None) -> list[int]:
        ids, detects = self._plan(encoder)
        return ids[:1] if detects else ids

    def _plan(self, encoder: EncoderPrompt | None) -> tuple[list[int], bool]:
        """Return the prompt, and True if a detected language belongs after its first id."""
        request = encoder if isinstance(encoder, AudioPrompt) else AudioPrompt("")
        is_chosen = request.language is not None or request.task is not None
        if is_chosen and self._setting("is_multilingual") is False:
            raise ValueError(
                "this checkpoint knows English only: neither language nor task can be chosen"
            )
        language = self._setting("language") if request.language is None else request.language
        task = self._setting("task") if request.task is None else request.task
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
            # After the language, whose position may still be empty.
            ids[2:2] = [tasks["transcribe"]]
        wanted = self._wants_timestamps(encoder)
        return self._with_timestamps([i for i in ids if i is not None], wanted), detects

    def _with_timestamps(self, ids: list[int], wanted: bool) -> list[int]:
        no_timestamps_id = self._setting("no_timestamps_token_id")
        if no_timestamps_id is None:
            if wanted:
                raise ValueError(
                    "timestamps are not to be had: the checkpoint's generation config has no "
                    "no_timestamps_token_id"
                )
            return ids
        if wanted:
            return ids[:-1] if ids[-1] == no_timestamps_id else ids
        return ids if ids[-1] == no_timestamps_id else [*ids, no_timestamps_id]

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
        """Return the forced ids that older checkpoints set instead of a language and a task."""
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
# Frames of the spectrogram per row: the second convolution has stride 2.
_FRAMES_PER_ROW = 2


class SpeechEncoder(EncoderModule):
    """Encodes spectrograms of whole windows to hidden states."""

    def __init__(self, config: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.module = build_empty(WhisperEncoder, config, settings)
        self.max_len = config.max_source_positions
        self.dtype = settings.dtype
        self.feature_shape = (config.num_mel_bins, self.max_len * _FRAMES_PER_ROW)

    def check_input(self, entry: EncoderInput) -> None:
        """Require a spectrogram that is padded or cut to the window."""
        shape = tuple(entry.features[_FEATURES].shape)
        if shape != self.feature_shape:
            raise ValueError(
                f"{_FEATURES} must be {self.feature_shape} (mel bins, frames), got {shape}"
            )

    def forward(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """See :meth:`EncoderModule.forward`."""
        features = self.stacked_feature(inputs, _FEATURES).to(self.dtype)
        return self.module(features).last_hidden_state.flatten(0, 1)


def whisper_config(config: PreTrainedConfig) -> Seq2SeqConfig:
    """Read the decoder's part of a config."""
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


def longest_text(config: PreTrainedConfig) -> int:
    """Return the number of positions that a config allows the decoder."""
    return config.max_target_positions


def build_whisper(checkpoint: Checkpoint, settings: ModelSettings) -> Seq2SeqModel:
    """Build a Whisper, its weights not yet loaded; see :class:`Seq2SeqModel`."""
    config = checkpoint.config
    model = Seq2SeqModel(
        whisper_config(config),
        lambda _: SpeechEncoder(config, settings),
        settings,
        checkpoint.weight_files,
    )
    for layer, head in getattr(checkpoint.generation_config, "alignment_heads", None) or ():
        if not (0 <= layer < config.decoder_layers and 0 <= head < config.decoder_attention_heads):
            raise ValueError(f"alignment_heads: the decoder has no head {head} in layer {layer}")
        # The cross-attention layers follow the self-attention layers.
        model.attention_layers[config.decoder_layers + layer].aligned_heads.append(head)
    return model


WHISPER_PROMPTS = partial(
    EncoderDecoderPromptProcessor, encoder_inputs=AudioEncoderInputs, decoder_rule=WhisperPromptRule
)
