"""Qwen3-ASR: Qwen3-Omni's audio tower with a projector, and Qwen3's decoder, for transcription.

Audio without text requests a transcription. The model first generates the detected language; if the
request gives one, it is part of the prompt, and only the words follow::

    <|im_start|>assistant\\n | language English<asr_text> | It was a bright cold day ...

Source: Qwen Team, "Qwen3-ASR Technical Report", 2026; transformers' ``qwen3_asr``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_asr.modeling_qwen3_asr import Qwen3ASRModel
from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.multimodal_inputs import MultiModalPromptProcessor
from engine.inputs.prompt_tokens import written
from engine.interface.prompts import (
    AudioPrompt,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TranscriptionOptions,
)
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import build_decoder
from engine.models.llava.llava import without_decoder
from engine.models.multimodal import MultiModalModel
from engine.models.qwen3_omni.thinker import Qwen3AudioTower
from engine.requests.encoder_input import MultiModalInput


class ProjectedAudioTower(Qwen3AudioTower):
    """Encodes audio of any length to projected rows, 13 per second."""

    encoder = partial(without_decoder, Qwen3ASRModel)
    known_weight = "multi_modal_projector.linear_1.weight"
    module: Any

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """Encode recordings one by one, padded to whole pieces; see :meth:`ItemTower.forward`."""
        rows, piece = [], 2 * self.audio.n_window
        for item in inputs:
            frames = item.features["input_features"]
            padded = nn.functional.pad(frames, (0, -frames.shape[1] % piece))[None]
            mask = torch.arange(padded.shape[2], device=self.module.device) < frames.shape[1]
            padded = padded.to(self.module.device, self.module.dtype)
            output = self.module.get_audio_features(padded, mask[None].long())
            rows.append(output.pooler_output)
        return rows


def known_language(language: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Return code and name of a language given by either, case-insensitively.

    ``names`` are those of the supported languages, by code; ``ValueError`` for another language.
    """
    for code, name in names.items():
        if language.lower() in (code.lower(), name.lower()):
            return code, name
    codes = ", ".join(sorted(names))
    raise ValueError(f"language {language!r} is unknown to this model; it knows {codes}")


class TranscriptionPrompts(MultiModalPromptProcessor):
    """Requests the transcription of audio without text, as the model was trained."""

    def transcription_text(self, chat: ChatPrompt, language: str | None, names: str | None) -> str:
        """Return the prompt text that requests a transcription.

        Args:
            chat: contains only the audio.
            language: spoken language, as code or English name; None: detected by the model.
            names: names with the desired spelling; ``ValueError`` if the model takes none.
        """
        if names is not None:
            system = {"role": "system", "content": [{"type": "text", "text": names}]}
            chat = replace(chat, messages=(system, *chat.messages))
        text, _ = written(chat, self._tokenizer, self._limits)
        if language is None:
            return text
        _, name = known_language(language, LANGUAGE_CODE_TO_NAME)
        return f"{text}language {name}<asr_text>"

    def as_message(self, prompt: Prompt) -> Prompt:
        """Convert audio without text to the checkpoint processor's transcription prompt."""
        chat = super().as_message(prompt)
        if chat is prompt or not isinstance(chat, ChatPrompt):
            return prompt
        (audio,) = chat.multi_modal_data["audio"]
        assert isinstance(audio, AudioPrompt)
        options = audio.transcription or TranscriptionOptions()
        text = self.transcription_text(chat, audio.language, options.prompt)
        # A single temperature is a sampling parameter; several are passed on, to be rejected.
        one = options.temperature is not None and len(options.temperature) == 1
        rest = replace(options, prompt=None, temperature=None if one else options.temperature)
        audio = replace(audio, language=None, transcription=rest if rest.given else None)
        return TextPrompt(text, False, {"audio": [audio]})


def build_qwen3_asr(checkpoint: Checkpoint, settings: ModelSettings) -> MultiModalModel:
    """Build a Qwen3-ASR, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    text = copy(config.text_config)
    # The whole config, not its text part, determines if the head is tied to the embedding.
    text.tie_word_embeddings = config.tie_word_embeddings
    return MultiModalModel(
        build_decoder(settings.decoder_config_of(text), text, settings),
        {"audio": ProjectedAudioTower(config, settings)},
        {"audio": int(config.audio_token_id)},
        checkpoint.weight_files,
    )
