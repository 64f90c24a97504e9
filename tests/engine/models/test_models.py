"""Loading decoders: what is counted and converted, and what a config asks for and is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from engine.checkpoints.checkpoint import Checkpoint
from engine.models.base import CausalModel, ModelSettings
from engine.models.model_loader import load_model
from engine.models.registry import FAMILIES
from omni.seeded.language_models import build_causal_lm
from prefix_cache import SlidingWindowSpec

WINDOW = 18


def build(folder: Path, family: str, **options: Any) -> Path:
    settings = {"num_layers": 3, "sliding_window": WINDOW, "with_tokenizer": False}
    return build_causal_lm(folder, family, **(settings | options))


def load(folder: str | Path, **options: Any) -> CausalModel:
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "block_size": 4,
        "max_model_len": 96,
    }
    return load_model(Checkpoint.open(folder), ModelSettings(**(settings | options)))


@pytest.mark.parametrize("family", ["qwen2", "jamba", "bamba"])
def test_a_shared_matrix_is_counted_once(family: str, tmp_path: Path):
    folder = build(tmp_path, family)
    stored = sum(t.nbytes for _, t in Checkpoint.open(folder).weights())
    assert load(folder, pack_weights=False).weight_nbytes == stored


def test_a_model_is_loaded_in_the_type_that_is_asked_for(tmp_path: Path):
    folder = build(tmp_path, "qwen2")
    model = load(folder, dtype=torch.bfloat16)
    assert model.embed(torch.tensor([1])).dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"packed for float32 on a CPU only, not torch.bfloat16"):
        load(folder, dtype=torch.bfloat16, pack_weights=True)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_are_scaled_as_in_transformers(family: str, dtype: torch.dtype, tmp_path: Path):
    # sqrt(72) is no number of any of these types.
    folder = build(tmp_path, family, hidden_size=72, num_heads=4, head_dim=16)
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
def test_what_a_config_asks_for_and_is_not_there_is_an_error(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
):
    folder = build(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message) as raised:
        load(folder)
    if "architectures" in changes:
        assert all(name in str(raised.value) for name in FAMILIES.architectures())
