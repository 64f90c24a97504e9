"""Loading BART, T5, Whisper and Mllama: their encoders, their weights, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoints.checkpoint import Checkpoint
from engine.models.base import ModelSettings
from engine.models.encoder_module import EncoderDecoderModel
from engine.models.mllama.mllama import MllamaModel
from engine.models.model_loader import find_family, load_model
from engine.requests.encoder_input import EncoderInput, EncoderView
from omni.seeded.encoder_decoders import build_bart, build_t5
from prefix_cache import CrossAttentionSpec
from tests.support.encoder_decoder_reference import EncoderDecoderReference
from tests.support.encoder_decoder_requests import Case, Oracle, noise_image

FAMILIES = ("bart", "t5", "t5-gated", "whisper", "mllama")


def load(folder: str | Path, **options: Any) -> EncoderDecoderModel:
    chosen: dict[str, Any] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "block_size": 4,
        "max_model_len": 128,
    }
    model = load_model(Checkpoint.open(folder), ModelSettings(**(chosen | options)))
    assert isinstance(model, EncoderDecoderModel)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_keeps_its_own_tokens_or_the_encoders(name: str, seeded: Callable[[str], str]):
    specs = [layer.spec for layer in load(seeded(name)).attention_layers]
    num_cross = sum(isinstance(spec, CrossAttentionSpec) for spec in specs)
    assert 0 < num_cross < len(specs)
    assert len(set(specs)) == 2
    # The group whose blocks mirror the stage outputs comes first.
    assert not isinstance(specs[0], CrossAttentionSpec)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "whisper"])
def test_weights_are_held_once(name: str, seeded: Callable[[str], str]):
    """Also the embedding, at which encoder, decoder and head look.

    Whisper's keys have no biases; ours have zeros, because queries and values have biases.
    """
    reference = EncoderDecoderReference(seeded(name))
    stored = {tensor.data_ptr(): tensor.nbytes for tensor in reference.model.state_dict().values()}
    assert load(seeded(name), pack_weights=False).weight_nbytes == sum(stored.values())


def test_limits_are_those_of_the_config(seeded: Callable[[str], str]):
    limits = {}
    for name in FAMILIES:
        checkpoint = Checkpoint.open(seeded(name))
        longest = find_family(checkpoint).max_positions(checkpoint.config)
        limits[name] = (longest, load(seeded(name)).max_encoder_len)
    assert limits == {
        "bart": (256, 256),
        "t5": (512, 512),
        "t5-gated": (512, 512),
        "whisper": (128, 100),
        "mllama": (512, 68),
    }


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> str:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    "name", ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"]
)
def test_embedding_is_found_under_any_of_its_names(name: str, tmp_path: Path):
    def rename(weights: dict[str, Tensor]) -> None:
        weights[name] = weights.pop("model.shared.weight")

    plain = load(build_bart(tmp_path / "plain")).state_dict()
    renamed = load(rewrite(build_bart(tmp_path / "renamed"), rename)).state_dict()
    assert plain.keys() == renamed.keys()
    assert all(torch.equal(plain[key], renamed[key]) for key in plain)


def test_missing_weights_are_named(tmp_path: Path):
    def drop(weights: dict[str, Tensor]) -> None:
        del weights["encoder.final_layer_norm.weight"], weights["shared.weight"]

    folder = rewrite(build_t5(tmp_path), drop)
    with pytest.raises(ValueError, match=r"lacks the weights shared\.weight, encoder\.final"):
        load(folder)


def test_t5_refuses_float16(seeded: Callable[[str], str]):
    with pytest.raises(ValueError, match="T5 overflows in float16"):
        load(seeded("t5"), dtype=torch.float16)


def text_input(num_tokens: int) -> EncoderInput:
    return EncoderInput(num_tokens, b"", token_ids=tuple(range(5, 5 + num_tokens)))


def speech_input(mel_bins: int = 16, num_rows: int = 100) -> EncoderInput:
    features = {"input_features": torch.zeros(mel_bins, 2 * num_rows)}
    return EncoderInput(num_rows, b"", features=features)


BAD: dict[str, list[tuple[EncoderInput | None, str]]] = {
    "bart": [
        (EncoderInput(0, b""), "has 0 tokens; this model takes 1 to 256"),
        (text_input(257), "has 257 tokens; this model takes 1 to 256"),
        (EncoderInput(2, b"", token_ids=(4, 768)), "must be 0 to 767"),
        (EncoderInput(2, b"", token_ids=(-1, 4)), "must be 0 to 767"),
        (EncoderInput(3, b"", token_ids=(5, 4)), "gives 2 rows .* num_tokens=3"),
        (speech_input(), "encodes text, got an encoder input with input_features"),
        (None, "needs an input for its encoder"),
    ],
    "whisper": [
        (text_input(100), "takes input_features"),
        (speech_input(num_rows=99), r"must be \(16, 200\) .* got \(16, 198\)"),
        (speech_input(mel_bins=80), r"must be \(16, 200\) .* got \(80, 200\)"),
        (replace(speech_input(), num_tokens=99), "gives 100 rows .* num_tokens=99"),
        (None, "needs an input for its encoder"),
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_an_encoder_says_what_is_wrong(name: str, seeded: Callable[[str], str]):
    model = load(seeded(name))
    for entry, message in BAD[name]:
        with pytest.raises(ValueError, match=message):
            model.encoder_view(entry, [2, 0])
        if entry is not None:
            with pytest.raises(ValueError, match=message):
                model.encode([entry])
    if name == "bart":
        assert model.encoder_view(text_input(9), [2, 0]) == EncoderView(0, 9, 9)


def test_an_image_has_one_place_from_which_on_tokens_see_its_tiles(seeded: Callable[[str], str]):
    model, oracle = load(seeded("mllama")), Oracle(seeded("mllama"))
    assert isinstance(model, MllamaModel)
    image = model.image_token_id
    good = oracle.read(Case(noise_image(110, 50), (), ""))
    assert good is not None and int(good.features["aspect_ratio_mask"].sum()) == 2
    assert model.encoder_view(good, [0, 9, image, 5]) == EncoderView(2, 68, 2 * 17)
    assert model.encoder_view(None, [0, 9]) == EncoderView(512, 0, 0)
    for entry, num_places in ((good, 0), (good, 2), (None, 1)):
        with pytest.raises(ValueError, match=f"has {num_places} image tokens"):
            model.encoder_view(entry, [0, *[image] * num_places])

    def with_feature(name: str, value: Tensor) -> EncoderInput:
        return replace(good, features={**good.features, name: value})

    two_images = good.features["pixel_values"].repeat(2, 1, 1, 1, 1)
    for entry, message in (
        (text_input(68), "takes the features pixel_values"),
        (
            with_feature("pixel_values", two_images),
            r"pixel_values of one image must be \(1, 4, 3, 56, 56\)",
        ),
        (
            with_feature("aspect_ratio_mask", torch.tensor([[0, 1, 0, 0]])),
            "must be ones and then zeros",
        ),
        (
            with_feature("aspect_ratio_ids", torch.tensor([0])),
            "aspect_ratio_ids must be 1 to 8, got 0",
        ),
        (replace(good, num_tokens=34), "gives 68 rows .* num_tokens=34"),
    ):
        with pytest.raises(ValueError, match=message):
            model.encode([entry])
