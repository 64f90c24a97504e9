"""The three models of a Qwen3-Omni checkpoint, each of which a stage of its own runs.

::

    part        config.json          weights
    thinker     thinker_config       thinker.model.layers.0...   text from text, image, sound
    talker      talker_config        talker.model.layers.0...    codes from the thinker
    code2wav    code2wav_config      code2wav.decoder...         waveform from codes

A checkpoint may hold a thinker alone. What a model needs is imported when it is built.
"""

from __future__ import annotations

from functools import partial

from engine.models.family import deferred, part_of
from engine.models.qwen3_omni.speech_prompts import Qwen3SpeechPrompts, speakers_of

_part = partial(part_of, "qwen3_omni_moe")

THINKER = _part(
    "thinker",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    build=deferred("engine.models.qwen3_omni.thinker:build_qwen3_omni_thinker"),
    is_first=True,
    prompts=deferred("engine.inputs.multimodal_inputs:MultiModalPromptProcessor"),
)
TALKER = _part(
    "talker",
    "Qwen3OmniMoeTalkerForConditionalGeneration",
    build=deferred("engine.models.qwen3_omni.talker:Qwen3OmniTalker"),
    prompts=Qwen3SpeechPrompts,
    reads_text=False,  # the tokenizer beside it is its thinker's
    speakers=speakers_of,
)
CODE2WAV = _part(
    "code2wav",
    "Qwen3OmniMoeCode2Wav",
    generator=deferred("engine.models.qwen3_omni.code2wav:Qwen3Code2Wav"),
)
