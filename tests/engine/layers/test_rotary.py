"""Rotary tables and the in-place rotation, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, PhiConfig, Qwen2_5_VLTextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

from engine.layers import MultiAxisRotaryEmbedding, RotaryEmbedding, apply_rotary, rope_frequencies

MAX_LEN = 96
HEAD_DIM = 16
THETA = {"rope_theta": 10_000.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0, **THETA},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **THETA},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        **THETA,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        **THETA,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [2.0 + 0.5 * i for i in range(HEAD_DIM // 2)],
        **THETA,
    },
}


def config_for(parameters: dict[str, Any], max_positions: int = MAX_LEN) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=max_positions,
        rope_parameters=dict(parameters),
    )


def rotary_for(config: Any, max_model_len: int) -> RotaryEmbedding:
    inv_freq, scaling = rope_frequencies(config, max_model_len)
    return RotaryEmbedding(
        inv_freq, scaling, max_model_len, dtype=torch.float32, device=torch.device("cpu")
    )


def heads(num_tokens: int, num_heads: int) -> Tensor:
    return torch.randn(
        num_tokens, num_heads, HEAD_DIM, generator=torch.Generator().manual_seed(num_heads)
    )


@pytest.mark.parametrize("max_model_len", [24, MAX_LEN])
@pytest.mark.parametrize("parameters", VARIANTS.values(), ids=VARIANTS.keys())
def test_rotation_equals_transformers(parameters: dict[str, Any], max_model_len: int):
    """At the longest sequence length, where the length-dependent variants agree by definition."""
    config = config_for(parameters)
    query, key = heads(max_model_len, 4), heads(max_model_len, 2)
    positions = torch.arange(max_model_len)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    expected = apply_rotary_pos_emb(query, key, cos[0], sin[0], unsqueeze_dim=1)

    own_cos, own_sin = rotary_for(config, max_model_len)(positions)
    rotated = apply_rotary(torch.cat((query, key), dim=1), own_cos, own_sin)
    torch.testing.assert_close(rotated, torch.cat(expected, dim=1), atol=1e-5, rtol=1e-5)


def test_dynamic_beyond_the_trained_length_equals_transformers_at_the_longest():
    config = config_for(VARIANTS["dynamic"], max_positions=32)
    positions = torch.arange(MAX_LEN)
    cos, sin = LlamaRotaryEmbedding(config)(heads(MAX_LEN, 1), positions[None])
    own_cos, own_sin = rotary_for(config, MAX_LEN)(positions)
    half = HEAD_DIM // 2
    torch.testing.assert_close(own_cos[:, 0], cos[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(own_sin[:, 0, half:], sin[0, :, half:], atol=1e-5, rtol=0)


def test_partial_rotation_leaves_the_other_channels_alone():
    config = PhiConfig(
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5, **THETA},
    )
    positions = torch.tensor([3, 11, 50])
    x = heads(3, 2)
    cos, sin = PhiRotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x[..., :8], x[..., :8], cos[0], sin[0])
    rotated = apply_rotary(x.clone(), *rotary_for(config, 64)(positions))
    torch.testing.assert_close(rotated[..., :8], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(rotated[..., 8:], x[..., 8:])


def test_rotation_works_inside_a_wider_tensor():
    qkv = torch.randn(5, 6 * HEAD_DIM, generator=torch.Generator().manual_seed(0))
    kept = qkv.clone()
    view = qkv[:, : 4 * HEAD_DIM].view(5, 4, HEAD_DIM)
    rotary = rotary_for(config_for(VARIANTS["default"]), MAX_LEN)
    cos, sin = rotary(torch.arange(5))
    expected = apply_rotary(view.clone(), cos, sin)
    apply_rotary(view, cos, sin)
    assert torch.equal(qkv[:, : 4 * HEAD_DIM], expected.flatten(1))
    assert torch.equal(qkv[:, 4 * HEAD_DIM :], kept[:, 4 * HEAD_DIM :])


def test_old_style_rope_scaling_is_read(tmp_path: Path):
    old = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(old))
    inv_freq, scaling = rope_frequencies(AutoConfig.from_pretrained(tmp_path), MAX_LEN)
    plain, _ = rope_frequencies(config_for({"rope_type": "default", "rope_theta": 500.0}), MAX_LEN)
    torch.testing.assert_close(inv_freq, plain / 2.0)
    assert scaling == 1.0


def test_unknown_variant_lists_the_known_ones():
    config = config_for(VARIANTS["default"])
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1.0}
    with pytest.raises(ValueError, match=r"rope_type 'spiral'; known are default, .*yarn"):
        rope_frequencies(config, MAX_LEN)


def test_config_without_rope_is_refused():
    config = config_for(VARIANTS["default"])
    config.rope_parameters = None
    with pytest.raises(ValueError, match="LlamaConfig has no rope_parameters"):
        rope_frequencies(config, MAX_LEN)


@pytest.mark.parametrize("sections", [[2, 3, 3], [1, 0, 7], [2, 1, 1, 2, 1, 1]])
def test_several_axes_equal_transformers(sections: list[int]):
    rope = {"rope_type": "default", "mrope_section": sections, **THETA}
    config = Qwen2_5_VLTextConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, rope_parameters=rope
    )
    positions = torch.randint(0, MAX_LEN, (3, 50), generator=torch.Generator().manual_seed(0))
    expected = Qwen2_5_VLRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    inv_freq, scaling = rope_frequencies(config, MAX_LEN)
    rotary = MultiAxisRotaryEmbedding(
        inv_freq,
        scaling,
        MAX_LEN,
        sections=sections,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cos, sin = rotary(positions)
    sign = torch.ones(HEAD_DIM)
    sign[: HEAD_DIM // 2] = -1
    torch.testing.assert_close(cos[:, 0], expected[0][0])
    torch.testing.assert_close(sin[:, 0] * sign, expected[1][0])


def test_sections_must_add_up():
    inv_freq = torch.ones(HEAD_DIM // 2)
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(ValueError, match=r"mrope_section \[2, 3, 4\] must add up to 8"):
        MultiAxisRotaryEmbedding(inv_freq, 1.0, MAX_LEN, sections=[2, 3, 4], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_type": ["default"]}, "rope_type must be a name, got"),
        ({"partial_rotary_factor": 1e9}, "partial_rotary_factor must be above 0 and at most 1"),
        ({"rope_theta": 0.0}, "give no finite frequencies"),
        ({"rope_theta": "large"}, "rope_parameters .* cannot be used: TypeError"),
        ({"rope_type": "yarn"}, "rope_parameters .* cannot be used: KeyError: 'factor'"),
    ],
)
def test_parameters_that_cannot_be_are_refused(changes: dict[str, Any], told: str) -> None:
    config = config_for(VARIANTS["default"])
    config.rope_parameters = VARIANTS["default"] | changes
    with pytest.raises(ValueError, match=told):
        rope_frequencies(config, MAX_LEN)


def test_heads_that_are_too_wide_are_refused_before_a_table_is_made() -> None:
    config = config_for(VARIANTS["default"])
    config.head_dim, config.hidden_size = None, 10**12
    with pytest.raises(ValueError, match=r"head_dim, or hidden_size by .*must be 1 to 65536"):
        rope_frequencies(config, MAX_LEN)


def test_a_table_made_in_pieces_is_the_one_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    inv_freq, scaling = rope_frequencies(config_for(VARIANTS["default"]), MAX_LEN)
    whole = RotaryEmbedding(inv_freq, scaling, MAX_LEN, **options).table
    monkeypatch.setattr("engine.layers.layer_ops._ROWS_AT_ONCE", 7)
    assert torch.equal(RotaryEmbedding(inv_freq, scaling, MAX_LEN, **options).table, whole)
