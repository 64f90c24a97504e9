"""Qwen3-ASR: Qwen3-Omni's audio tower with a projector, and Qwen3's decoder, which writes it down.

A sound alone asks for a transcription. The model first says which language it heard; one that the
prompt names stands there already, and the words alone follow::

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
    """Sound of any length to rows, 13 for a second, through the projector."""

    encoder = partial(without_decoder, Qwen3ASRModel)
    known_weight = "multi_modal_projector.linear_1.weight"
    module: Any

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """One sound by itself, filled up to whole pieces; see :meth:`ItemTower.forward`."""
        rows, piece = [], 2 * self.audio.n_window
        for item in inputs:
            frames = item.features["input_features"]
            filled = nn.functional.pad(frames, (0, -frames.shape[1] % piece))[None]
            is_sound = torch.arange(filled.shape[2], device=self.module.device) < frames.shape[1]
            filled = filled.to(self.module.device, self.module.dtype)
            output = self.module.get_audio_features(filled, is_sound[None].long())
            rows.append(output.pooler_output)
        return rows


def known_language(language: str, names: Mapping[str, str]) -> tuple[str, str]:
    """The code and the name of a language that is given by either, in any case.

    Args:
        names: of the languages that a model knows, by their codes.

    Raises:
        ValueError: the model does not know it.
    """
    for code, name in names.items():
        if language.lower() in (code.lower(), name.lower()):
            return code, name
    codes = ", ".join(sorted(names))
    raise ValueError(f"language {language!r} is unknown to this model; it knows {codes}")


class TranscriptionPrompts(MultiModalPromptProcessor):
    """Asks for the words of a sound that comes alone, as the model was trained."""

    def asked(self, chat: ChatPrompt, language: str | None, names: str | None) -> str:
        """The text that asks for the words of a sound.

        Args:
            chat: shows the sound alone.
            language: that is spoken, by its code or in English; None: the model finds out.
            names: to be spelled so; None: there are none.

        Raises:
            ValueError: the model cannot be asked so.
        """
        if names is not None:
            said = {"role": "system", "content": [{"type": "text", "text": names}]}
            chat = replace(chat, messages=(said, *chat.messages))
        text, _ = written(chat, self._tokenizer, self._limits)
        if language is None:
            return text
        _, name = known_language(language, LANGUAGE_CODE_TO_NAME)
        return f"{text}language {name}<asr_text>"

    def as_message(self, prompt: Prompt) -> Prompt:
        """A sound alone is to be written down, as the checkpoint's processor asks for it."""
        chat = super().as_message(prompt)
        if chat is prompt or not isinstance(chat, ChatPrompt):
            return prompt
        (sound,) = chat.multi_modal_data["audio"]
        assert isinstance(sound, AudioPrompt)
        options = sound.transcription or TranscriptionOptions()
        text = self.asked(chat, sound.language, options.prompt)
        # One temperature is that of the sampling parameters; of several, further ones are refused.
        one = options.temperature is not None and len(options.temperature) == 1
        left = replace(options, prompt=None, temperature=None if one else options.temperature)
        sound = replace(sound, language=None, transcription=left if left.given else None)
        return TextPrompt(text, False, {"audio": [sound]})


def build_qwen3_asr(checkpoint: Checkpoint, settings: ModelSettings) -> MultiModalModel:
    """Build a Qwen3-ASR, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    text = copy(config.text_config)
    # Whether the head is the embedding is a matter of the whole, not of its text part.
    text.tie_word_embeddings = config.tie_word_embeddings
    return MultiModalModel(
        build_decoder(settings.decoder_config_of(text), text, settings),
        {"audio": ProjectedAudioTower(config, settings)},
        {"audio": int(config.audio_token_id)},
        checkpoint.weight_files,
    )
