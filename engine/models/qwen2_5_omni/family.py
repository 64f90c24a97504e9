"""The three models of a Qwen2.5-Omni checkpoint, each of which a stage of its own runs.

::

    part        config.json          weights
    thinker     thinker_config       thinker.model.layers.0...   text from text, image, sound
    talker      talker_config        talker.model.layers.0...    codec tokens from the thinker
    code2wav    token2wav_config     token2wav.code2wav_dit...   waveform from codec tokens
"""

from __future__ import annotations

from functools import partial

from engine.checkpoints.checkpoint_parts import CheckpointPart
from engine.inputs.multimodal_inputs import MultiModalPromptProcessor
from engine.models.family import ModelFamily
from engine.models.qwen2_5_omni.code2wav import Code2Wav
from engine.models.qwen2_5_omni.speech_prompt import SpeechPromptProcessor
from engine.models.qwen2_5_omni.talker import build_qwen2_5_omni_talker
from engine.models.qwen2_5_omni.thinker import build_qwen2_5_omni_thinker

__all__ = ["CODE2WAV", "TALKER", "THINKER"]

_part = partial(CheckpointPart, whole="qwen2_5_omni")

THINKER = ModelFamily(
    "thinker",
    ("Qwen2_5OmniThinkerForConditionalGeneration",),
    build=build_qwen2_5_omni_thinker,
    prompts=MultiModalPromptProcessor.from_sources,
    part=_part(
        name="thinker",
        config_name="thinker_config",
        prefix="thinker.",
        architecture="Qwen2_5OmniThinkerForConditionalGeneration",
        has_generation_config=True,
    ),
)
TALKER = ModelFamily(
    "talker",
    ("Qwen2_5OmniTalkerForConditionalGeneration",),
    build=build_qwen2_5_omni_talker,
    prompts=SpeechPromptProcessor.from_sources,
    reads_text=False,  # the tokenizer beside it is its thinker's
    part=_part(
        name="talker",
        config_name="talker_config",
        prefix="talker.",
        architecture="Qwen2_5OmniTalkerForConditionalGeneration",
    ),
)
CODE2WAV = ModelFamily(
    "code2wav",
    ("Qwen2_5OmniToken2WavModel",),
    generator=Code2Wav,
    part=_part(
        name="code2wav",
        config_name="token2wav_config",
        prefix="token2wav.",
        architecture="Qwen2_5OmniToken2WavModel",
    ),
)
