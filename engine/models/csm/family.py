"""The two models of a CSM checkpoint, each of which a stage of its own runs.

::

    part        config.json     weights
    backbone    the whole       backbone_model..., depth_decoder...     codes from text and sound
    mimi        codec_config    codec_model...                          waveform from codes

What a model needs is imported when it is built.
"""

from __future__ import annotations

from engine.checkpoints.checkpoint import CheckpointPart
from engine.models.family import ModelFamily, deferred

BACKBONE = ModelFamily(
    "backbone",
    ("CsmForConditionalGeneration",),
    build=deferred("engine.models.csm.backbone:CsmBackbone"),
    prompts=deferred("engine.models.csm.backbone:CsmPrompts"),
    part=CheckpointPart("backbone", "csm", "", "", "CsmForConditionalGeneration", True),
)
MIMI = ModelFamily(
    "mimi",
    ("MimiModel",),
    generator=deferred("engine.models.csm.codec:MimiCodec"),
    part=CheckpointPart("mimi", "csm", "codec_config", "codec_model.", "MimiModel"),
)
