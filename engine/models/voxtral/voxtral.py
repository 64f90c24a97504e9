"""Voxtral: a speech encoder with a projector, and a decoder that answers or transcribes.

Audio is padded with silence to whole windows of 30 s, which are encoded separately::

    audio   | window 0        | window 1   ~~~~ |    3,000 frames each
    rows    | 375             | 375             |    one for eight frames

Audio without text requests a transcription, with the prompt that the model was trained on::

    <s>[INST][BEGIN_AUDIO] | rows | [/INST]lang:en[TRANSCRIBE]

Source: Liu et al., "Voxtral", 2025; transformers' ``voxtral``; for prompts, the tokenizer package
of the model's publisher.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.voxtral.modeling_voxtral import VoxtralModel
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.prompt_tokens import written
from engine.interface.prompts import ChatPrompt
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import build_decoder
from engine.models.llava.llava import without_decoder
from engine.models.multimodal import MultiModalModel
from engine.models.qwen2_5_omni.thinker import AudioTower
from engine.models.qwen3_asr.qwen3_asr import TranscriptionPrompts, known_language
from engine.requests.encoder_input import MultiModalInput

CHAT_TEMPLATE = """\
{% macro parts(content) %}{% if content is string %}{{ content }}{% else %}\
{% for part in content %}\
{% if part.type == 'audio' %}[BEGIN_AUDIO][AUDIO]{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}{% endmacro %}\
{{ bos_token or '<s>' }}{% for message in messages %}\
{% if message.role == 'user' %}[INST]{{ parts(message.content) }}[/INST]\
{% elif message.role == 'assistant' %}{{ parts(message.content) }}{{ eos_token or '</s>' }}\
{% elif message.role == 'system' %}[SYSTEM_PROMPT]{{ parts(message.content) }}[/SYSTEM_PROMPT]\
{% else %}{{ raise_exception('this model reads no messages of the role ' ~ message.role) }}\
{% endif %}{% endfor %}"""
"""Chat template missing in published folders, where it is part of another package."""


class VoxtralTower(AudioTower):
    """Encodes windows of audio to projected rows; see the module docstring."""

    encoder = partial(without_decoder, VoxtralModel)
    known_weight = "multi_modal_projector.linear_1.weight"
    sound_end = "window"
    module: Any

    def __init__(self, config: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__(config, settings)
        # Of two convolutions one halves the length; then adjacent rows are merged.
        self.window = 2 * int(self.audio.max_source_positions)
        self.frames_per_row: int = 2 * self.audio.intermediate_size // self.audio.hidden_size

    def rows_of(self, num_frames: int) -> int:
        """See :meth:`AudioTower.rows_of`; raises ``ValueError`` for partial windows."""
        if num_frames % self.window:
            raise ValueError(
                f"input_features must be whole windows of {self.window} frames, got {num_frames}"
            )
        return num_frames // self.frames_per_row

    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """Encode one window after the other; see :meth:`ItemTower.forward`."""
        hear, device, dtype = self.module.get_audio_features, self.module.device, self.module.dtype
        rows = []
        for item in inputs:
            windows = item.features["input_features"].split(self.window, dim=1)
            encoded = [hear(each[None].to(device, dtype)).pooler_output for each in windows]
            rows.append(torch.cat(encoded))
        return rows


class VoxtralPrompts(TranscriptionPrompts):
    """Requests the transcription of audio without text, as the model was trained."""

    def transcription_text(self, chat: ChatPrompt, language: str | None, names: str | None) -> str:
        """See :meth:`TranscriptionPrompts.transcription_text`."""
        if names is not None:
            raise ValueError("this model takes no prompt beside the sound that it writes down")
        text, _ = written(chat, self._tokenizer, self._limits)
        if language is not None:
            text += f"lang:{known_language(language, LANGUAGES)[0]}"
        return f"{text}[TRANSCRIBE]"


def build_voxtral(checkpoint: Checkpoint, settings: ModelSettings) -> MultiModalModel:
    """Build a Voxtral, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    return MultiModalModel(
        build_decoder(settings.decoder_config_of(config.text_config), config.text_config, settings),
        {"audio": VoxtralTower(config, settings)},
        {"audio": int(config.audio_token_id)},
        checkpoint.weight_files,
    )
