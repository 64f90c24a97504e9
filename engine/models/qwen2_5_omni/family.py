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

from functools import partial
from pathlib import Path

from engine.models.family import deferred, part_of
from engine.models.qwen2_5_omni.speakers import SpeechPromptProcessor, load_speakers

_part = partial(part_of, "qwen2_5_omni")


def _speakers(path: Path) -> tuple[str, ...]:
    return load_speakers(path).names


THINKER = _part(
    "thinker",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    build=deferred("engine.models.qwen2_5_omni.thinker:build_qwen2_5_omni_thinker"),
    is_first=True,
    prompts=deferred("engine.inputs.multimodal_inputs:MultiModalPromptProcessor"),
)
TALKER = _part(
    "talker",
    "Qwen2_5OmniTalkerForConditionalGeneration",
    build=deferred("engine.models.qwen2_5_omni.talker:Qwen2_5OmniTalker"),
    prompts=SpeechPromptProcessor,
    reads_text=False,  # the tokenizer beside it is its thinker's
    speakers=_speakers,
)
CODE2WAV = _part(
    "code2wav",
    "Qwen2_5OmniToken2WavModel",
    stored="token2wav",
    generator=deferred("engine.models.qwen2_5_omni.code2wav:Code2Wav"),
    speakers=_speakers,
)
