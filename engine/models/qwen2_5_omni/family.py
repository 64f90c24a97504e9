"""The three models of a Qwen2.5-Omni checkpoint, each of which a stage of its own runs.

::

    part        config.json          weights
    thinker     thinker_config       thinker.model.layers.0...   text from text, image, sound
    talker      talker_config        talker.model.layers.0...    codec tokens from the thinker
    code2wav    token2wav_config     token2wav.code2wav_dit...   waveform from codec tokens

What a model needs is imported when it is built: towers and the vocoder bring transformers'
modelling along, and readers of sound and images, which a talker's process would load for nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.checkpoints.checkpoint import Checkpoint, CheckpointPart
from engine.inputs.prompt_processor import PromptProcessor, PromptSources
from engine.models.base import ModelSettings
from engine.models.family import ModelFamily
from engine.models.qwen2_5_omni.speakers import SpeechPromptProcessor, load_speakers

if TYPE_CHECKING:
    from engine.models.qwen2_5_omni.code2wav import Code2Wav
    from engine.models.qwen2_5_omni.talker import Qwen2_5OmniTalker
    from engine.models.qwen2_5_omni.thinker import Qwen2_5OmniThinker

__all__ = ["CODE2WAV", "TALKER", "THINKER"]


def _family(name: str, stored: str, architecture: str, **declared: Any) -> ModelFamily:
    """A part, by the name under which config and weights are stored."""
    is_first = name == "thinker"  # the one that generation_config.json is about
    whole, config_name, prefix = "qwen2_5_omni", f"{stored}_config", f"{stored}."
    part = CheckpointPart(name, whole, config_name, prefix, architecture, is_first)
    return ModelFamily(name, (architecture,), part=part, **declared)


def _build_thinker(checkpoint: Checkpoint, settings: ModelSettings) -> Qwen2_5OmniThinker:
    from engine.models.qwen2_5_omni.thinker import build_qwen2_5_omni_thinker

    return build_qwen2_5_omni_thinker(checkpoint, settings)


def _thinker_prompts(sources: PromptSources) -> PromptProcessor:
    from engine.inputs.multimodal_inputs import MultiModalPromptProcessor

    return MultiModalPromptProcessor(sources)


def _build_talker(checkpoint: Checkpoint, settings: ModelSettings) -> Qwen2_5OmniTalker:
    from engine.models.qwen2_5_omni.talker import Qwen2_5OmniTalker

    return Qwen2_5OmniTalker(checkpoint.config, settings)


def _build_code2wav(checkpoint: Checkpoint, device: torch.device) -> Code2Wav:
    from engine.models.qwen2_5_omni.code2wav import Code2Wav

    return Code2Wav(checkpoint, device)


def _speakers(path: Path) -> tuple[str, ...]:
    return load_speakers(path).names


THINKER = _family(
    "thinker",
    "thinker",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    build=_build_thinker,
    prompts=_thinker_prompts,
)
TALKER = _family(
    "talker",
    "talker",
    "Qwen2_5OmniTalkerForConditionalGeneration",
    build=_build_talker,
    prompts=SpeechPromptProcessor,
    reads_text=False,  # the tokenizer beside it is its thinker's
    speakers=_speakers,
)
CODE2WAV = _family(
    "code2wav",
    "token2wav",
    "Qwen2_5OmniToken2WavModel",
    generator=_build_code2wav,
    speakers=_speakers,
)
