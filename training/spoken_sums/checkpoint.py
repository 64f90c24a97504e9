"""Writes the checkpoint in the layout of the published Qwen2.5-Omni, with 16-bit weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from training.spoken_sums.dit import Voice
from training.spoken_sums.log_mel import feature_extractor
from training.spoken_sums.sizes import VISION, omni_config

MAX_BYTES = 24_000_000
"""Maximum size of the whole folder."""

SPEAKERS: Mapping[str, tuple[str, str]] = {
    "Ada": ("slt", "<tts_bos>"),
    "Ben": ("rms", "<tts_bos_2>"),
}
"""Per speaker the flite voice, and the token that opens the replies."""

Parts = Mapping[str, Mapping[str, Tensor]]
"""State dicts of ``thinker``, ``talker``, ``dit`` and ``bigvgan``."""

_DTYPE = torch.bfloat16


def write_checkpoint(
    folder: Path, parts: Parts, voices: Mapping[str, Voice], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Write config, weights, tokenizer, processors' settings and voices.

    Args:
        folder: created if missing.
        parts: the trained weights.
        voices: by flite's names.
        tokenizer: the thinker's.

    Raises:
        ValueError: a weight is not finite, or the folder is too large.
        RuntimeError: weights are missing or unexpected.
    """
    torch.manual_seed(0)  # for the image tower, which is not trained
    model: Any = Qwen2_5OmniForConditionalGeneration(omni_config(tokenizer))
    places: dict[str, nn.Module] = {
        "thinker": model.thinker,
        "talker": model.talker,
        "dit": model.token2wav.code2wav_dit_model,
        "bigvgan": model.token2wav.code2wav_bigvgan_model,
    }
    for name, module in places.items():
        module.load_state_dict(parts[name])
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{name} holds what is no number")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(_DTYPE).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_processors(folder)
    speakers = {
        name: {
            "bos_token": tokenizer.get_vocab()[token],
            "cond": voices[voice].conditioning,
            "ref_mel": voices[voice].reference_mel,
        }
        for name, (voice, token) in SPEAKERS.items()
    }
    # Only tensors and plain containers: it is loaded with ``weights_only=True``.
    torch.save(speakers, folder / "spk_dict.pt")
    for file in filter(Path.is_file, folder.iterdir()):
        file.chmod(0o644)  # weights are written with owner-only permissions
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > MAX_BYTES:
        raise ValueError(f"{folder} has {size} bytes, and may have {MAX_BYTES}")


def _write_processors(folder: Path) -> None:
    """Image processor and feature extractor share a file, as in published checkpoints."""
    image = Qwen2VLImageProcessorPil(
        patch_size=VISION["patch_size"],
        temporal_patch_size=VISION["temporal_patch_size"],
        merge_size=VISION["spatial_merge_size"],
        min_pixels=28**2,
        max_pixels=16 * 28**2,
    )
    audio = feature_extractor().to_dict()
    both = image.to_dict() | audio | {"processor_class": "Qwen2_5OmniProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(both, indent=2, default=str))
    video = {"fps": 2.0, "min_frames": 4, "max_frames": 768}
    video |= {"min_pixels": image.size["shortest_edge"], "max_pixels": image.size["longest_edge"]}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))
