"""Images become what transformers' image processor makes of them, or a clear error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

from engine import AudioPrompt, ImagePrompt
from engine.inputs.encoder_decoder_inputs import ImageEncoderInputs
from engine.media.image_file import load_image_processor
from tests.support.fixed_encoder import FixedEncoder

NAMES = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> ImageEncoderInputs:
    folder = tmp_path_factory.mktemp("processor")
    MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=4).save_pretrained(
        folder
    )
    return ImageEncoderInputs(FixedEncoder(68), load_image_processor(folder), NAMES)


def picture(width: int = 40, height: int = 20, seed: int = 0, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def test_an_image_becomes_the_processors_tiles(inputs: ImageEncoderInputs) -> None:
    made = inputs.make(ImagePrompt(picture()), cache_salt=None)
    processor = MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=4)
    expected = processor(picture(), return_tensors="pt")
    assert made.features.keys() == set(NAMES)
    for name in NAMES:
        assert torch.equal(made.features[name], expected[name][0])
    assert made.num_tokens == 68


def test_a_file_is_known_by_its_pixels(inputs: ImageEncoderInputs, tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    images = [tmp_path / "a.png", str(tmp_path / "a.png"), picture(), picture(seed=1)]
    hashes = [inputs.make(ImagePrompt(image), cache_salt=None).content_hash for image in images]
    assert len({*hashes[:3]}) == 1
    assert hashes[3] != hashes[0]
    salted = inputs.make(ImagePrompt(picture()), cache_salt="a").content_hash
    assert salted != hashes[0]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", "encoder takes an image, but the encoder prompt is text"),
        (AudioPrompt("a.wav"), "the encoder prompt is audio"),
        (ImagePrompt(3), "image must be a file, an image of Pillow or an array of pixels, got int"),
    ],
)
def test_other_prompts_are_refused(
    prompt: object, expected: str, inputs: ImageEncoderInputs
) -> None:
    with pytest.raises(ValueError, match=expected):
        inputs.make(prompt, cache_salt=None)


def test_a_checkpoint_without_a_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="image processor in .* cannot be loaded"):
        load_image_processor(tmp_path)
