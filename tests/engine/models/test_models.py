"""Every model against transformers with the same weights, over packed mixed batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from engine.checkpoints.checkpoint import Checkpoint
from engine.models.base import CausalModel, ModelSettings
from engine.models.model_loader import load_model
from engine.models.registry import FAMILIES
from omni.seeded.language_models import build_causal_lm
from tests.support.packed_model import run_packed

LENGTHS = (23, 9, 40)
# Chunked prefills beside decodes: all kinds of steps, and every request ends at its length.
STEPS = ((8, 9, 0), (8, 0, 17), (6, 0, 1), (1, 0, 22))

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2 untied": ("qwen2", {"tied": False}),
    "qwen2 window that is off": ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True, "tied": False}),
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": (
        "llama",
        {
            "tied": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama all heads alike": ("llama", {"num_kv_heads": 4, "hidden_act": "gelu"}),
    "mistral": ("mistral", {"tied": False}),
    "mistral wide window": ("mistral", {"sliding_window": 64}),
}


def load(folder: str | Path, **options: Any) -> CausalModel:
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "block_size": 4,
        "max_model_len": 64,
    }
    return load_model(Checkpoint.open(folder), ModelSettings(**(settings | options)))


def sequences(vocab_size: int = 768) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


@torch.inference_mode()
def reference(folder: str | Path) -> list[tuple[Tensor, Tensor]]:
    """Hidden states after the final norm, and logits, of each sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = [model(input_ids=ids[None], output_hidden_states=True) for ids in sequences()]
    return [(output.hidden_states[-1][0], output.logits[0]) for output in outputs]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_and_logits_equal_transformers(name: str, backend: str, tmp_path: Path):
    family, settings = VARIANTS[name]
    folder = build_causal_lm(tmp_path, family, with_tokenizer=False, **settings)
    model = load(folder)
    packed = run_packed(model, sequences(), STEPS, backend=backend)
    for hidden, (expected_hidden, expected_logits) in zip(packed, reference(folder), strict=True):
        torch.testing.assert_close(hidden, expected_hidden, atol=1e-4, rtol=0)
        logits = model.compute_logits(hidden)
        torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 16])
def test_block_size_does_not_matter(block_size: int, tmp_path: Path):
    folder = build_causal_lm(tmp_path, with_tokenizer=False)
    expected = run_packed(load(folder), sequences(), STEPS)
    packed = run_packed(load(folder, block_size=block_size), sequences(), STEPS)
    for hidden, other in zip(packed, expected, strict=True):
        torch.testing.assert_close(hidden, other, atol=1e-5, rtol=0)


def test_packed_weights_change_rounding_only(tmp_path: Path):
    folder = build_causal_lm(tmp_path, tied=False, with_tokenizer=False)
    plain, packed = (load(folder, pack_weights=choice) for choice in (False, True))
    for a, b in zip(*(run_packed(m, sequences(), STEPS) for m in (plain, packed)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        torch.testing.assert_close(plain.compute_logits(a), packed.compute_logits(a))
    assert packed.weight_nbytes == plain.weight_nbytes


def test_weight_nbytes_counts_a_shared_matrix_once(tmp_path: Path):
    folder = build_causal_lm(tmp_path, with_tokenizer=False)
    stored = sum(t.nbytes for _, t in Checkpoint.open(folder).weights())
    assert load(folder, pack_weights=False).weight_nbytes == stored


def test_headless_checkpoint_runs_and_has_no_logits(tmp_path: Path):
    for family in ("qwen2", "qwen3", "llama", "mistral"):
        folder = build_causal_lm(
            tmp_path / family, family, with_head=False, tied=False, with_tokenizer=False
        )
        model = load(folder)
        packed = run_packed(model, sequences(), STEPS)
        with torch.inference_mode():
            encoder = AutoModel.from_pretrained(folder)
            expected = encoder(input_ids=sequences()[0][None]).last_hidden_state[0]
        torch.testing.assert_close(packed[0], expected, atol=1e-4, rtol=0)
        assert model.vocab_size == 0
        with pytest.raises(ValueError, match="no language-model head"):
            model.compute_logits(packed[0])


def test_sharded_checkpoint_equals_single_file(tmp_path: Path):
    single = load(build_causal_lm(tmp_path / "single", with_tokenizer=False))
    folder = build_causal_lm(tmp_path / "sharded", with_tokenizer=False, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    for a, b in zip(
        *(run_packed(m, sequences(), STEPS) for m in (single, load(folder))), strict=True
    ):
        assert torch.equal(a, b)


def test_bfloat16_stays_near_float32(tmp_path: Path):
    folder = build_causal_lm(tmp_path, with_tokenizer=False)
    model = load(folder, dtype=torch.bfloat16)
    assert model.embed(torch.tensor([1])).dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_the_callers_embeddings_are_left_alone(tmp_path: Path):
    model = load(build_causal_lm(tmp_path, with_tokenizer=False))
    kept: list[tuple[Tensor, Tensor]] = []
    forward = model.forward

    def spy(inputs_embeds: Tensor, positions: Tensor, step: Any) -> dict[str, Tensor]:
        kept.append((inputs_embeds, inputs_embeds.clone()))
        return forward(inputs_embeds, positions, step)

    model.forward = spy  # type: ignore[method-assign]
    run_packed(model, sequences(), STEPS)
    assert len(kept) == len(STEPS)
    assert all(torch.equal(given, before) for given, before in kept)


def test_unsupported_architecture_lists_the_supported(tmp_path: Path):
    folder = build_causal_lm(tmp_path, with_tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPT9"]}))
    with pytest.raises(ValueError, match="unsupported architecture 'GPT9'") as raised:
        load(folder)
    assert all(name in str(raised.value) for name in FAMILIES.architectures())


def test_packing_needs_float32_on_a_cpu(tmp_path: Path):
    folder = build_causal_lm(tmp_path, with_tokenizer=False)
    with pytest.raises(ValueError, match=r"packed for float32 on a CPU only, not torch.bfloat16"):
        load(folder, dtype=torch.bfloat16, pack_weights=True)
