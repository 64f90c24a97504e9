"""Decoders that see images: towers against transformers, names of weights, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from engine.checkpoints.checkpoint import Checkpoint
from engine.models.base import ModelSettings
from engine.models.model_loader import find_family, load_model
from engine.models.multimodal import MultiModalModel
from engine.requests.encoder_input import MultiModalInput
from omni.seeded.multimodal import build_llava, build_qwen2_5_vl

Features = dict[str, Tensor]
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "llava": build_llava,
    "llava of all rows over qwen2": partial(build_llava, strategy="full", model_type="qwen2"),
    "llava tied": partial(build_llava, tie_word_embeddings=True),
    "qwen2.5-vl": build_qwen2_5_vl,
    "qwen2.5-vl tied": partial(build_qwen2_5_vl, tied=True),
}


def load(folder: Path, **options: Any) -> MultiModalModel:
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "block_size": 4,
        "max_model_len": 96,
    }
    model = load_model(Checkpoint.open(folder), ModelSettings(**(settings | options)))
    assert isinstance(model, MultiModalModel)
    return model


def image(model: MultiModalModel, seed: int, *, wide: bool = False) -> Features:
    """Noise; for Qwen2.5-VL in 4 x 4 rows, which are several windows, or in 2 x 3."""
    generator = torch.Generator().manual_seed(seed)
    if "image_grid_thw" not in model.towers["image"].feature_names:
        return {"pixel_values": torch.randn(3, 56, 56, generator=generator)}
    height, width = (4, 6) if wide else (8, 8)
    return {
        "pixel_values": torch.randn(height * width, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([1, height, width]),
    }


def input_of(model: MultiModalModel, features: Features) -> MultiModalInput:
    return MultiModalInput("image", 3, model.num_rows("image", features), b"", features)


@torch.inference_mode()
@pytest.mark.parametrize("name", BUILDERS)
def test_rows_of_images_equal_transformers(name: str, tmp_path: Path):
    folder = BUILDERS[name](tmp_path)
    model = load(folder)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    items = [input_of(model, image(model, 1)), input_of(model, image(model, 2, wide=True))]
    for item, rows in zip(items, model.encode_multimodal(items), strict=True):
        assert rows.shape == (item.length, model.hidden_size)
        features = dict(item.features)
        if "image_grid_thw" in features:
            features["image_grid_thw"] = features["image_grid_thw"][None]
        else:
            features["pixel_values"] = features["pixel_values"][None]
        (expected,) = theirs.get_image_features(**features, return_dict=True).pooler_output
        torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)


def _nested(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


def _newer(name: str) -> str:
    """As recent exports name them: everything but the head in ``model.``."""
    if name.endswith("lm_head.weight"):
        return "lm_head.weight"
    name = name.replace("language_model.model.", "language_model.")
    if name.startswith(("vision_tower.", "multi_modal_projector.", "language_model.", "visual.")):
        return "model." + name
    return name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize(
    ("name", "rename"),
    [("llava", _nested), ("llava", _newer), ("qwen2.5-vl", _newer)],
)
def test_every_published_naming_of_weights_loads(
    name: str, rename: Callable[[str], str], tmp_path: Path
):
    folder = BUILDERS[name](tmp_path)
    before = load(folder).state_dict()
    weights = load_file(folder / "model.safetensors")
    renamed = {rename(key): tensor for key, tensor in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    after = load(folder).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_towers_keep_the_frequencies_of_their_own_type(tmp_path: Path):
    folder = build_qwen2_5_vl(tmp_path)
    wide, narrow = (load(folder, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    buffers = dict(wide.towers["image"].named_buffers())
    assert buffers
    for key, buffer in narrow.towers["image"].named_buffers():
        assert torch.equal(buffer, buffers[key])
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    (rows,) = narrow.encode_multimodal([input_of(narrow, image(narrow, 1))])
    assert rows.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llava", "llava tied", "qwen2.5-vl", "qwen2.5-vl tied"])
def test_weights_are_counted_with_the_tower(name: str, tmp_path: Path):
    folder = BUILDERS[name](tmp_path)
    checkpoint = Checkpoint.open(folder)
    stored = sum(tensor.nbytes for _, tensor in checkpoint.weights())
    assert load(folder, pack_weights=False).weight_nbytes == stored
    assert find_family(checkpoint).max_positions(checkpoint.config) == 1024, "the text part's"


@pytest.mark.parametrize("name", ["llava tied", "qwen2.5-vl tied"])
def test_a_tied_head_that_is_stored_as_well_is_left_there(name: str, tmp_path: Path):
    folder = BUILDERS[name](tmp_path)
    weights = load_file(folder / "model.safetensors")
    (embedding,) = (weights[key] for key in weights if key.endswith("embed_tokens.weight"))
    weights["lm_head.weight"] = torch.zeros_like(embedding)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    logits = load(folder).compute_logits(torch.eye(embedding.shape[1]))
    torch.testing.assert_close(logits, embedding.T)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llava", {"pixel_values": torch.zeros(3, 56, 55)}, r"must be \(3, 56, 56\), got"),
        ("llava", {"image_sizes": torch.zeros(2)}, "takes the features pixel_values; got"),
        ("qwen2.5-vl", {"image_grid_thw": torch.tensor([1, 8])}, "three numbers"),
        ("qwen2.5-vl", {"image_grid_thw": torch.tensor([2, 8, 4])}, "1 and two multiples of 2"),
        ("qwen2.5-vl", {"image_grid_thw": torch.tensor([1, 3, 8])}, "1 and two multiples of 2"),
        ("qwen2.5-vl", {"image_grid_thw": torch.tensor([1, 0, 8])}, "1 and two multiples of 2"),
        ("qwen2.5-vl", {"image_grid_thw": torch.tensor([1, 4, 8])}, "4 x 8 patches must be"),
    ],
)
def test_features_of_something_else_are_refused(
    name: str, change: Features, message: str, tmp_path: Path
):
    model = load(BUILDERS[name](tmp_path))
    with pytest.raises(ValueError, match=message):
        model.num_rows("image", image(model, 1) | change)


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_placeholders_that_do_not_match_the_image_are_refused(name: str, tmp_path: Path):
    model = load(BUILDERS[name](tmp_path))
    features = image(model, 1)
    wrong = MultiModalInput("image", 3, model.num_rows("image", features) + 1, b"", features)
    with pytest.raises(ValueError, match=r"at position 3 has 1\d placeholders; .* give 1\d rows"):
        model.encode_multimodal([wrong])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"text_config": {"model_type": "opt"}}, "a decoder of type 'opt'; supported are llama"),
        (
            {"vision_config": {"model_type": "pixtral"}},
            "a tower of type 'pixtral'; supported is clip",
        ),
    ],
)
def test_parts_that_are_not_supported_are_refused(
    part: dict[str, Any], message: str, tmp_path: Path
):
    folder = build_llava(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | part))
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_one_placeholder_for_two_modalities_is_refused(tmp_path: Path):
    folder = build_qwen2_5_vl(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["video_token_id"] = config["image_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"a placeholder of its own, got image (\d+), video \1$"):
        load(folder)


def test_sections_that_do_not_fit_the_heads_are_refused(tmp_path: Path):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    for sections in ([2, 3, 2], None):
        folder = build_qwen2_5_vl(tmp_path)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["rope_parameters"] = rope | (
            {} if sections is None else {"mrope_section": sections}
        )
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="mrope_section"):
            load(folder)
