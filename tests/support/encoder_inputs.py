"""Encoder inputs for models that the seeded checkpoints hold."""

from __future__ import annotations

from hashlib import sha256

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from engine.requests.encoder_input import EncoderInput

__all__ = ["image_input", "speech_input", "text_input"]

_IMAGE_FEATURES = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")


def text_input(num_tokens: int, vocab_size: int = 700, seed: int = 0) -> EncoderInput:
    """Random tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(5, vocab_size, (num_tokens,), generator=generator).tolist())
    return EncoderInput(num_tokens, _digest(torch.tensor(ids)), token_ids=ids)


def speech_input(mel_bins: int = 16, num_rows: int = 100, seed: int = 0) -> EncoderInput:
    """A random spectrogram of a whole window."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(mel_bins, 2 * num_rows, generator=generator)
    return EncoderInput(num_rows, _digest(features), features={"input_features": features})


def image_input(
    folder: str, width: int, height: int, *, num_rows: int = 68, seed: int = 0
) -> EncoderInput:
    """A random image, as the checkpoint's processor cuts it into tiles."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    processor = AutoImageProcessor.from_pretrained(folder)
    made = processor(Image.fromarray(pixels.numpy()), return_tensors="pt")
    features = {name: made[name][0] for name in _IMAGE_FEATURES}
    return EncoderInput(num_rows, _digest(features["pixel_values"]), features=features)


def _digest(values: Tensor) -> bytes:
    return sha256(values.contiguous().numpy().tobytes()).digest()
