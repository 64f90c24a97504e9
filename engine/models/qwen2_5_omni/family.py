"""The three models of a Qwen2.5-Omni checkpoint, each of which a stage of its own runs.

::

    part        config.json          weights
    thinker     thinker_config       thinker.model.layers.0...   text from text, image, sound
    talker      talker_config        talker.model.layers.0...    codec tokens from the thinker
    code2wav    token2wav_config     token2wav.code2wav_dit...   waveform from codec tokens
"""

from __future__ import annotations

from typing import Any

from engine.checkpoints.checkpoint_parts import CheckpointPart
from engine.inputs.multimodal_inputs import MultiModalPromptProcessor
from engine.models.family import ModelFamily
from engine.models.qwen2_5_omni.code2wav import Code2Wav
from engine.models.qwen2_5_omni.speech_prompt import SpeechPromptProcessor
from engine.models.qwen2_5_omni.talker import Qwen2_5OmniTalker
from engine.models.qwen2_5_omni.thinker import build_qwen2_5_omni_thinker

__all__ = ["CODE2WAV", "TALKER", "THINKER"]


def _family(name: str, stored: str, architecture: str, **declared: Any) -> ModelFamily:
    """A part, by the name under which config and weights are stored."""
    is_first = name == "thinker"  # the one that generation_config.json is about
    whole, config_name, prefix = "qwen2_5_omni", f"{stored}_config", f"{stored}."
    part = CheckpointPart(name, whole, config_name, prefix, architecture, is_first)
    return ModelFamily(name, (architecture,), part=part, **declared)


THINKER = _family(
    "thinker",
    "thinker",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    build=build_qwen2_5_omni_thinker,
    prompts=MultiModalPromptProcessor,
)
TALKER = _family(
    "talker",
    "talker",
    "Qwen2_5OmniTalkerForConditionalGeneration",
    build=lambda checkpoint, settings: Qwen2_5OmniTalker(checkpoint.config, settings),
    prompts=SpeechPromptProcessor,
    reads_text=False,  # the tokenizer beside it is its thinker's
)
CODE2WAV = _family("code2wav", "token2wav", "Qwen2_5OmniToken2WavModel", generator=Code2Wav)
