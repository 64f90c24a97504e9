"""Jamba and Bamba against transformers with the same weights, over packed mixed batches.

The oracle is one full pass: in chunks, transformers' own Jamba drifts from it by a tenth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from engine.checkpoints.checkpoint import Checkpoint
from engine.layers import NativeLayerOps
from engine.models.base import CausalModel, ModelSettings
from engine.models.model_loader import load_model
from engine.native import load_kernels
from omni.seeded.language_models import build_causal_lm
from prefix_cache import FullAttentionSpec, MambaSpec
from tests.support.examples import examples
from tests.support.greedy_reference import GreedyReference, assert_greedy
from tests.support.native_kernels import needs_kernels
from tests.support.packed_model import PackedRun, run_packed

LENGTHS = (23, 9, 40, 150)
# Chunked prefills beside decodes, requests that pause, and all end at their length.
STEPS = ((8, 9, 0, 70), (8, 0, 17, 1), (6, 0, 1, 0), (1, 0, 22, 79))

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "jamba": ("jamba", {"tied": False}),
    "jamba tied": ("jamba", {}),
    "jamba without experts": ("jamba", {"num_experts": 1}),
    "jamba with all experts": ("jamba", {"num_experts_per_tok": 4}),
    "jamba with other biases": ("jamba", {"mamba_proj_bias": True, "mamba_conv_bias": False}),
    "jamba with a wide convolution": ("jamba", {"mamba_d_conv": 7, "hidden_act": "gelu"}),
    "jamba all mamba": ("jamba", {"attn_layer_period": 9, "attn_layer_offset": 8}),
    "jamba all attention": ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}),
    "bamba": ("bamba", {"tied": False}),
    "bamba tied, one group": (
        "bamba",
        {"mamba_n_groups": 1, "attn_layer_indices": [1, 3]},
    ),
    "bamba with biases": (
        "bamba",
        {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True},
    ),
    "bamba without a bias": ("bamba", {"mamba_conv_bias": False}),
    "bamba with limited steps": ("bamba", {"time_step_limit": (0.3, 0.9)}),
    "bamba all mamba": ("bamba", {"attn_layer_indices": []}),
    "bamba yarn": (
        "bamba",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
}


def build(folder: Path, family: str, **options: Any) -> Path:
    settings = {"num_layers": 4, "with_tokenizer": False, "vocab_size": 300}
    return build_causal_lm(folder, family, **(settings | options))


def load(folder: str | Path, **options: Any) -> CausalModel:
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "block_size": 4,
        "max_model_len": 256,
    }
    return load_model(Checkpoint.open(folder), ModelSettings(**(settings | options)))


def sequences(lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 300, (length,), generator=generator) for length in lengths]


@torch.inference_mode()
def reference(folder: str | Path) -> list[tuple[Tensor, Tensor]]:
    """Hidden states after the final norm, and logits, of each sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = [
        model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
        for ids in sequences()
    ]
    return [(output.hidden_states[-1][0], output.logits[0]) for output in outputs]


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], atol: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_and_logits_equal_transformers(name: str, tmp_path: Path):
    family, options = VARIANTS[name]
    folder = build(tmp_path, family, **options)
    model = load(folder)
    packed = run_packed(model, sequences(), STEPS)
    for hidden, (expected_hidden, expected_logits) in zip(packed, reference(folder), strict=True):
        torch.testing.assert_close(hidden, expected_hidden, atol=1e-4, rtol=0)
        logits = model.compute_logits(hidden)
        torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", ["jamba", "bamba"])
@pytest.mark.parametrize(
    "choice",
    [
        {"block_size": 16},
        {"block_size": 1},
        {"pack_weights": False},
        {"backend": "reference"},
        pytest.param({"backend": "native"}, marks=needs_kernels),
    ],
    ids=str,
)
def test_blocks_kernels_and_packed_weights_change_rounding_only(
    family: str, choice: dict[str, Any], tmp_path: Path
):
    folder = build(tmp_path, family)
    expected = run_packed(load(folder), sequences(), STEPS)
    options = dict(choice)
    backend = options.pop("backend", "torch")
    if backend == "native":
        options["ops"] = NativeLayerOps(load_kernels())
    packed = run_packed(load(folder, **options), sequences(), STEPS, backend=backend)
    assert_close(packed, expected, atol=5e-5)


@pytest.mark.parametrize("family", ["jamba", "bamba"])
def test_a_batch_gives_each_request_what_it_gets_alone(family: str, tmp_path: Path):
    model = load(build(tmp_path, family))
    alone = [
        run_packed(model, [ids], [(counts[r],) for counts in STEPS if counts[r]])[0]
        for r, ids in enumerate(sequences())
    ]
    assert_close(run_packed(model, sequences(), STEPS), alone, atol=1e-5)


@pytest.fixture(scope="module", params=["jamba", "bamba"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    folder = build(tmp_path_factory.mktemp(request.param), request.param)
    return load(folder), [hidden for hidden, _ in reference(folder)]


Shared = tuple[CausalModel, list[Tensor]]


@st.composite
def lengths_and_steps(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Chunks of three requests, in steps that may leave requests out."""
    chunk = st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(2, 12)), max_size=3)
    steps = [(chunks + [0] * 3)[:3] for chunks in draw(st.lists(chunk, min_size=1, max_size=6))]
    # Whoever has had no token yet gets one in a last step.
    missing = [int(not any(counts)) for counts in zip(*steps, strict=True)]
    steps = [counts for counts in [*steps, missing] if any(counts)]
    return [sum(counts) for counts in zip(*steps, strict=True)], steps


@settings(max_examples=examples(20))
@given(drawn=lengths_and_steps(), seed=st.integers(0, 99))
def test_no_way_of_chunking_and_interleaving_matters(
    shared: Shared, drawn: tuple[list[int], list[list[int]]], seed: int
):
    model, expected = shared
    lengths, steps = drawn
    # The longest sequence has 150 tokens, more than any drawn: its beginnings serve all three.
    prompts = [sequences()[3][:length] for length in lengths]
    packed = run_packed(model, prompts, steps, seed=seed)
    assert_close(packed, [expected[3][:length] for length in lengths], atol=1e-4)


@pytest.mark.parametrize("family", ["jamba", "bamba"])
def test_greedy_tokens_equal_transformers(family: str, seeded: Callable[[str], str]):
    folder = seeded(family)
    model, theirs = load(folder), GreedyReference(folder)
    prompts = sequences((31, 5, 18))
    run = PackedRun(model, [len(prompt) + 12 for prompt in prompts])
    nothing = torch.empty(0, dtype=torch.long)
    # The first request decodes beside the others' prefills.
    run.step([prompts[0][:20], prompts[1], nothing])
    hidden = run.step([prompts[0][20:], nothing, prompts[2][:7]])
    generated: list[list[int]] = [[], [], []]

    def next_ids(rows: list[Tensor]) -> list[Tensor]:
        chosen = []
        for ids, row in zip(generated, rows, strict=True):
            if len(row):
                ids.append(int(model.compute_logits(row[-1:]).argmax()))
            chosen.append(torch.tensor(ids[-1:]) if len(row) else nothing)
        return chosen

    (first, _, _) = next_ids([hidden[0], nothing, nothing])
    hidden = run.step([first, prompts[1][:0], prompts[2][7:]])
    for _ in range(10):
        ids = next_ids([hidden[0], nothing, hidden[2]])
        hidden = run.step([ids[0], nothing, ids[2]])
    for r in (0, 2):
        answer = theirs.from_ids(prompts[r].tolist(), len(generated[r]))
        assert_greedy(answer, generated[r])
        assert len(set(generated[r])) > 3, "a model that repeats itself shows little"


@pytest.mark.parametrize("family", ["jamba", "bamba"])
def test_layers_say_what_they_keep(family: str, tmp_path: Path):
    model = load(build(tmp_path, family), dtype=torch.bfloat16)
    attention = {layer.layer_name for layer in model.attention_layers}
    states = {layer.layer_name for layer in model.state_layers}
    with_attention = {"jamba": {2}, "bamba": {1}}[family]
    assert attention == {f"layers.{i}.self_attn" for i in with_attention}
    assert states == {f"layers.{i}.mamba" for i in set(range(4)) - with_attention}
    assert {type(layer.spec) for layer in model.attention_layers} == {FullAttentionSpec}
    (spec,) = {layer.spec for layer in model.state_layers}
    assert isinstance(spec, MambaSpec)
    conv, recurrent = spec.states
    # 64 hidden channels, twice that inside; Bamba's B and C (2 groups of 16) go through as well.
    channels = {"jamba": 128, "bamba": 128 + 2 * 2 * 16}[family]
    assert (conv.shape, conv.dtype) == ((3, channels), torch.bfloat16)
    assert recurrent.dtype == torch.float32
    assert recurrent.shape == {"jamba": (128, 8), "bamba": (8, 16, 16)}[family]


@pytest.mark.parametrize("family", ["jamba", "bamba"])
def test_headless_checkpoint_runs_and_has_no_logits(family: str, tmp_path: Path):
    folder = build(tmp_path, family, with_head=False, tied=False)
    model = load(folder)
    packed = run_packed(model, sequences(), STEPS)
    with torch.inference_mode():
        theirs = AutoModel.from_pretrained(folder)
        expected = theirs(input_ids=sequences()[0][None]).last_hidden_state[0]
    torch.testing.assert_close(packed[0], expected, atol=1e-4, rtol=0)
    assert model.vocab_size == 0
    with pytest.raises(ValueError, match="no language-model head"):
        model.compute_logits(packed[0])


@pytest.mark.parametrize("family", ["jamba", "bamba"])
def test_weight_nbytes_counts_what_the_checkpoint_stores(family: str, tmp_path: Path):
    folder = build(tmp_path, family)
    stored = sum(t.nbytes for _, t in Checkpoint.open(folder).weights())
    assert load(folder, pack_weights=False).weight_nbytes == stored


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("jamba", {"mamba_d_conv": 1}, "at least 2 tokens, got 1"),
        ("jamba", {"num_experts_per_tok": 9}, "1 to 4 experts.*num_experts_per_tok is 9"),
        ("jamba", {"hidden_act": "swishy"}, "hidden_act must be one of .*, got 'swishy'"),
        ("jamba", {"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3"),
        ("jamba", {"mamba_d_state": 16}, "x_proj.weight in .* has shape"),
        ("bamba", {"time_step_limit": None}, "time_step_limit must be two numbers"),
        ("bamba", {"mamba_n_groups": 3}, "multiple of its groups, got 8 and 3"),
    ],
)
def test_what_the_config_asks_for_and_is_not_there_is_an_error(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
):
    folder = build(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        load(folder)
