"""The three models of a Qwen3-Omni checkpoint, each of which a stage of its own runs.

::

    part        config.json          weights
    thinker     thinker_config       thinker.model.layers.0...   text from text, image, sound
    talker      talker_config        talker.model.layers.0...    codes from the thinker
    code2wav    code2wav_config      code2wav.decoder...         waveform from codes

A checkpoint may hold a thinker alone. What a model needs is imported when it is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.checkpoints.checkpoint import Checkpoint, CheckpointPart
from engine.inputs.prompt_processor import PromptProcessor, PromptSources
from engine.models.base import ModelSettings
from engine.models.family import ModelFamily
from engine.models.qwen3_omni.speech_prompts import Qwen3SpeechPrompts, speakers_of

if TYPE_CHECKING:
    from engine.models.qwen3_omni.code2wav import Qwen3Code2Wav
    from engine.models.qwen3_omni.talker import Qwen3OmniTalker
    from engine.models.qwen3_omni.thinker import Qwen3OmniThinker

__all__ = ["CODE2WAV", "TALKER", "THINKER"]


def _family(name: str, architecture: str, **declared: Any) -> ModelFamily:
    is_first = name == "thinker"  # the one that generation_config.json is about
    part = CheckpointPart(
        name, "qwen3_omni_moe", f"{name}_config", f"{name}.", architecture, is_first
    )
    return ModelFamily(name, (architecture,), part=part, **declared)


def _build_thinker(checkpoint: Checkpoint, settings: ModelSettings) -> Qwen3OmniThinker:
    from engine.models.qwen3_omni.thinker import build_qwen3_omni_thinker

    return build_qwen3_omni_thinker(checkpoint, settings)


def _thinker_prompts(sources: PromptSources) -> PromptProcessor:
    from engine.inputs.multimodal_inputs import MultiModalPromptProcessor

    return MultiModalPromptProcessor(sources)


def _build_talker(checkpoint: Checkpoint, settings: ModelSettings) -> Qwen3OmniTalker:
    from engine.models.qwen3_omni.talker import Qwen3OmniTalker

    return Qwen3OmniTalker(checkpoint.config, settings)


def _build_code2wav(checkpoint: Checkpoint, device: torch.device) -> Qwen3Code2Wav:
    from engine.models.qwen3_omni.code2wav import Qwen3Code2Wav

    return Qwen3Code2Wav(checkpoint, device)


THINKER = _family(
    "thinker",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    build=_build_thinker,
    prompts=_thinker_prompts,
)
TALKER = _family(
    "talker",
    "Qwen3OmniMoeTalkerForConditionalGeneration",
    build=_build_talker,
    prompts=Qwen3SpeechPrompts,
    reads_text=False,  # the tokenizer beside it is its thinker's
    speakers=speakers_of,
)
CODE2WAV = _family("code2wav", "Qwen3OmniMoeCode2Wav", generator=_build_code2wav)
