"""Loading models: encoders and towers against transformers, weight names, invalid configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    CLIPTextConfig,
    CLIPTextModel,
)

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import SCHEMES
from engine.layers.layer_ops import LayerOps, PackedWeight
from engine.models.base import CausalModel, ModelSettings
from engine.models.encoder_module import EncoderDecoderModel, QuantizedLinear, build_empty
from engine.models.mllama.mllama import MllamaModel
from engine.models.model_loader import find_family, load_model
from engine.models.multimodal import MultiModalModel
from engine.models.registry import FAMILIES
from engine.requests.encoder_input import EncoderInput, EncoderView, MultiModalInput
from omni.seeded.language_models import (
    build_bart,
    build_causal_lm,
    build_llava,
    build_qwen2_5_vl,
    build_qwen3_vl,
    build_t5,
)
from prefix_cache import CrossAttentionSpec, SlidingWindowSpec
from tests.support.encoder_decoder_reference import EncoderDecoderReference
from tests.support.encoder_decoder_requests import Case, Oracle, noise_image

WINDOW = 18


def build(folder: Path, family: str, **options: Any) -> Path:
    settings = {"num_hidden_layers": 3, "sliding_window": WINDOW, "with_tokenizer": False}
    return build_causal_lm(folder, family, **(settings | options))


def load(folder: str | Path, **options: Any) -> CausalModel:
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "block_size": 4,
        "max_model_len": 96,
    }
    return load_model(Checkpoint.open(folder), ModelSettings(**(settings | options)))


def test_a_model_is_loaded_in_the_type_that_is_asked_for(tmp_path: Path):
    folder = build(tmp_path, "qwen2")
    model = load(folder, dtype=torch.bfloat16)
    assert model.embed(torch.tensor([1])).dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_are_scaled_as_in_transformers(family: str, dtype: torch.dtype, tmp_path: Path):
    # sqrt(72) is not representable in any of these types.
    folder = build(tmp_path, family, hidden_size=72, num_attention_heads=4, head_dim=16)
    ids = torch.randint(0, 768, (9,), generator=torch.Generator().manual_seed(3))
    theirs = AutoModel.from_pretrained(folder, dtype=dtype).get_input_embeddings()
    assert torch.equal(load(folder, dtype=dtype).embed(ids), theirs(ids).detach())


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_a_window_that_no_sequence_outgrows_is_full_attention(family: str, tmp_path: Path):
    folder = build(tmp_path, family)
    for longest in (WINDOW, WINDOW + 1):
        layers = load(folder, max_model_len=longest).attention_layers
        slides = any(isinstance(layer.spec, SlidingWindowSpec) for layer in layers)
        assert slides == (longest > WINDOW)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"architectures": ["GPT9"]}, "unsupported architecture 'GPT9'"),
        ("gemma2", {"use_bidirectional_attention": True}, "bidirectional attention; only causal"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional attention; only"),
        (
            "ministral",
            {"layer_types": ["chunked_attention", "full_attention", "full_attention"]},
            "layer 0 of .* is 'chunked_attention'; supported are",
        ),
        ("ministral", {"sliding_window": None}, "sliding_window is None"),
        ("jamba", {"mamba_d_conv": 1}, "at least 2 tokens, got 1"),
        ("jamba", {"num_experts_per_tok": 9}, "1 to 4 experts.*num_experts_per_tok is 9"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "1 to 8 experts.*num_experts_per_tok is 9"),
        ("jamba", {"hidden_act": "swishy"}, "hidden_act must be one of .*, got 'swishy'"),
        ("jamba", {"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3"),
        ("jamba", {"mamba_d_state": 16}, "x_proj.weight in .* has shape"),
        ("bamba", {"time_step_limit": None}, "time_step_limit must be two numbers"),
        ("bamba", {"mamba_n_groups": 3}, "multiple of its groups, got 8 and 3"),
    ],
)
def test_invalid_and_unsupported_configs_are_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
):
    folder = build(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message) as raised:
        load(folder)
    if "architectures" in changes:
        assert all(name in str(raised.value) for name in FAMILIES.architectures())


Features = dict[str, Tensor]
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "llava": build_llava,
    "llava of all rows over qwen2": partial(build_llava, strategy="full", model_type="qwen2"),
    "llava tied": partial(build_llava, tie_word_embeddings=True),
    "qwen2.5-vl": build_qwen2_5_vl,
    "qwen2.5-vl tied": partial(build_qwen2_5_vl, tied=True),
}


def load_multimodal(folder: Path, **options: Any) -> MultiModalModel:
    model = load(folder, **options)
    assert isinstance(model, MultiModalModel)
    return model


def image(model: MultiModalModel, seed: int, *, wide: bool = False) -> Features:
    """Return noise; for Qwen2.5-VL of 4 x 4 rows, which are several windows, or of 2 x 3."""
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
    model = load_multimodal(folder)
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
    """Return the name in recent exports: all but the head are in ``model.``."""
    if name.endswith("lm_head.weight"):
        return "lm_head.weight"
    name = name.replace("language_model.model.", "language_model.")
    if name.startswith(("vision_tower.", "multi_modal_projector.", "language_model.", "visual.")):
        return "model." + name
    return name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize(
    ("name", "rename"), [("llava", _nested), ("llava", _newer), ("qwen2.5-vl", _newer)]
)
def test_every_published_naming_of_weights_loads(
    name: str, rename: Callable[[str], str], tmp_path: Path
):
    folder = BUILDERS[name](tmp_path)
    before = load_multimodal(folder).state_dict()
    weights = load_file(folder / "model.safetensors")
    renamed = {rename(key): tensor for key, tensor in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    after = load_multimodal(folder).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_a_tower_is_quantized_as_it_is_loaded(form: str, bias: bool):
    plain, scheme = nn.Linear(70, 32, bias=bias), SCHEMES[form]
    settings = ModelSettings(torch.float32, torch.device("cpu"), 4, 96)
    layer = QuantizedLinear("a.b", plain, settings, scheme)
    for name, target in layer.targets("tower."):
        target.copy_(getattr(plain, name.removeprefix("tower.a.b.")).data)
    x = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(0))
    expected = F.linear(x, scheme.quantize(plain.weight.data).dequantize(), plain.bias)
    torch.testing.assert_close(layer(x), expected, rtol=5e-3, atol=5e-3)
    assert layer.weight is None and plain.weight.nbytes / 9 < layer.nbytes < plain.weight.nbytes / 2


class PlainOps(LayerOps):
    def pack_weight(self, weight: Tensor) -> PackedWeight:
        return super().pack_weight(weight.float())


class TileOps(PlainOps):
    has_tiles = True


def test_a_bfloat16_tower_attends_in_tiles_where_there_are_some():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    config = CLIPTextConfig(**sizes, bos_token_id=0, eos_token_id=8)
    outputs, mask = [], torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    for ops in PlainOps(), TileOps():
        settings = ModelSettings(
            torch.float32, torch.device("cpu"), 4, 96, ops, stored_dtype=torch.bfloat16
        )
        tower = build_empty(CLIPTextModel, config, settings)
        assert (tower.config._attn_implementation == "sdpa") != ops.has_tiles
        generator = torch.Generator().manual_seed(0)
        for layer in tower.modules():
            if isinstance(layer, QuantizedLinear):
                for _, target in layer.targets(""):
                    target.copy_(torch.randn(target.shape, generator=generator))
        for parameter in tower.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        ids = torch.arange(10).view(2, 5) % 9
        outputs.append(tower(ids, attention_mask=mask).last_hidden_state[mask])
    expected, tiled = outputs
    error = float((tiled - expected).norm() / expected.norm())
    assert 0 < error < 0.02


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_experts_that_are_stored_transposed_load(quantization: str | None, tmp_path: Path):
    """The hub stores them transposed; transformers writes the other layout, and reads both."""
    folder = build_qwen3_vl(tmp_path, experts=True)
    tokens = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))

    def mixed() -> Tensor:
        decoder: Any = load(folder, quantization=quantization).decoder
        return decoder.layers[0].mlp(tokens)

    before = mixed()
    weights = load_file(folder / "model.safetensors")
    for key, tensor in weights.items():
        if ".experts." in key:
            weights[key] = tensor.transpose(1, 2).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(mixed(), before)


def test_towers_keep_the_frequencies_of_their_own_type(tmp_path: Path):
    folder = build_qwen2_5_vl(tmp_path)
    wide, narrow = (
        load_multimodal(folder, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    buffers = dict(wide.towers["image"].named_buffers())
    assert buffers
    for key, buffer in narrow.towers["image"].named_buffers():
        assert torch.equal(buffer, buffers[key])
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    (rows,) = narrow.encode_multimodal([input_of(narrow, image(narrow, 1))])
    assert rows.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name", ["qwen2", "jamba", "bamba", *(each for each in BUILDERS if "over" not in each)]
)
@pytest.mark.usefixtures("unpacked")
def test_weights_are_counted_once_and_with_the_tower(name: str, tmp_path: Path):
    folder = BUILDERS[name](tmp_path) if name in BUILDERS else build(tmp_path, name)
    checkpoint = Checkpoint.open(folder)
    stored = sum(tensor.nbytes for _, tensor in checkpoint.weights())
    assert load(folder).weight_nbytes == stored
    if name in BUILDERS:
        assert find_family(checkpoint).max_positions(checkpoint.config) == 1024, "the text part's"


@pytest.mark.parametrize("name", ["llava tied", "qwen2.5-vl tied"])
def test_a_tied_head_that_is_stored_as_well_is_left_there(name: str, tmp_path: Path):
    folder = BUILDERS[name](tmp_path)
    weights = load_file(folder / "model.safetensors")
    (embedding,) = (weights[key] for key in weights if key.endswith("embed_tokens.weight"))
    weights["lm_head.weight"] = torch.zeros_like(embedding)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    logits = load_multimodal(folder).compute_logits(torch.eye(embedding.shape[1]))
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
def test_features_of_other_shapes_are_refused(
    name: str, change: Features, message: str, tmp_path: Path
):
    model = load_multimodal(BUILDERS[name](tmp_path))
    with pytest.raises(ValueError, match=message):
        model.num_rows("image", image(model, 1) | change)


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_placeholders_that_do_not_match_the_image_are_refused(name: str, tmp_path: Path):
    model = load_multimodal(BUILDERS[name](tmp_path))
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
        load_multimodal(folder)


def test_one_placeholder_for_two_modalities_is_refused(tmp_path: Path):
    folder = build_qwen2_5_vl(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["video_token_id"] = config["image_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"a placeholder of its own, got image (\d+), video \1$"):
        load_multimodal(folder)


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
            load_multimodal(folder)


PAIRS = ("bart", "t5", "t5-gated", "whisper", "mllama")


def load_pair(folder: str | Path, **options: Any) -> EncoderDecoderModel:
    model = load(folder, **options)
    assert isinstance(model, EncoderDecoderModel)
    return model


@pytest.mark.parametrize("name", PAIRS)
def test_every_layer_keeps_its_own_tokens_or_the_encoders(name: str, seeded: Callable[[str], str]):
    specs = [layer.spec for layer in load_pair(seeded(name)).attention_layers]
    num_cross = sum(isinstance(spec, CrossAttentionSpec) for spec in specs)
    assert 0 < num_cross < len(specs)
    assert len(set(specs)) == 2
    # The group whose blocks hold the stage outputs comes first.
    assert not isinstance(specs[0], CrossAttentionSpec)


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "whisper"])
@pytest.mark.usefixtures("unpacked")
def test_weights_are_held_once(name: str, seeded: Callable[[str], str]):
    """Also the embedding, which encoder, decoder and head share.

    Whisper's keys have no biases; ours have zeros, because queries and values have biases.
    """
    reference = EncoderDecoderReference(seeded(name))
    stored = {tensor.data_ptr(): tensor.nbytes for tensor in reference.model.state_dict().values()}
    assert load_pair(seeded(name)).weight_nbytes == sum(stored.values())


def test_limits_are_those_of_the_config(seeded: Callable[[str], str]):
    limits = {}
    for name in PAIRS:
        checkpoint = Checkpoint.open(seeded(name))
        longest = find_family(checkpoint).max_positions(checkpoint.config)
        limits[name] = (longest, load_pair(seeded(name)).max_encoder_len)
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

    plain = load_pair(build_bart(tmp_path / "plain")).state_dict()
    renamed = load_pair(rewrite(build_bart(tmp_path / "renamed"), rename)).state_dict()
    assert plain.keys() == renamed.keys()
    assert all(torch.equal(plain[key], renamed[key]) for key in plain)


def test_missing_weights_are_named(tmp_path: Path):
    def drop(weights: dict[str, Tensor]) -> None:
        del weights["encoder.final_layer_norm.weight"], weights["shared.weight"]

    folder = rewrite(build_t5(tmp_path), drop)
    with pytest.raises(ValueError, match=r"lacks the weights shared\.weight, encoder\.final"):
        load_pair(folder)


def test_t5_refuses_float16(seeded: Callable[[str], str]):
    with pytest.raises(ValueError, match="T5 overflows in float16"):
        load_pair(seeded("t5"), dtype=torch.float16)


def text_input(num_tokens: int) -> EncoderInput:
    return EncoderInput(num_tokens, b"", token_ids=tuple(range(5, 5 + num_tokens)))


def speech_input(mel_bins: int = 16, num_rows: int = 100) -> EncoderInput:
    features = {"input_features": torch.zeros(mel_bins, 2 * num_rows)}
    return EncoderInput(num_rows, b"", features=features)


BAD: dict[str, list[tuple[EncoderInput | None, str]]] = {
    "bart": [(None, "needs an input for its encoder")],
    "whisper": [
        (speech_input(num_rows=99), r"must be \(16, 200\) .* got \(16, 198\)"),
        (speech_input(mel_bins=80), r"must be \(16, 200\) .* got \(80, 200\)"),
        (None, "needs an input for its encoder"),
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_an_encoder_refuses_invalid_inputs(name: str, seeded: Callable[[str], str]):
    model = load_pair(seeded(name))
    for entry, message in BAD[name]:
        with pytest.raises(ValueError, match=message):
            model.encoder_view(entry, [2, 0])
    if name == "bart":
        assert model.encoder_view(text_input(9), [2, 0]) == EncoderView(0, 9, 9)


def test_an_image_has_one_place_from_which_on_tokens_see_its_tiles(seeded: Callable[[str], str]):
    model, oracle = load_pair(seeded("mllama")), Oracle(seeded("mllama"))
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
    ):
        with pytest.raises(ValueError, match=message):
            model.encoder.check_input(entry)
