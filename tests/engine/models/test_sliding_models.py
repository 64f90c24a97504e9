"""Families with sliding windows and soft caps against transformers, over packed mixed batches.

Pages that a window has passed hold NaN in all of these runs; see :class:`PackedRun`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from engine.checkpoints.checkpoint import Checkpoint
from engine.layers import LayerOps, NativeLayerOps
from engine.models.base import CausalModel, ModelSettings
from engine.models.model_loader import load_model
from engine.native import load_kernels
from omni.seeded.language_models import build_causal_lm
from prefix_cache import FullAttentionSpec, SlidingWindowSpec
from tests.support.examples import examples
from tests.support.greedy_reference import GreedyAnswer, GreedyReference, assert_greedy
from tests.support.native_kernels import needs_kernels
from tests.support.packed_model import PackedRun, run_packed

SLIDING, FULL = "sliding_attention", "full_attention"
# Wider than the larger block, no multiple of either.
WINDOW = 18
LENGTHS = (75, 9, 61)
# Chunks shorter and longer than the window, decodes beside prefills, everything at once.
STEPS = ((30, 0, 5), (1, 9, 40), (20, 0, 1), (1, 0, 1), (23, 0, 14))
MAX_LEN = 96
NUM_TOKENS = 24

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "mistral untied": ("mistral", {"tied": False}),
    "qwen2 upper layers": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen2 all layers": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 0, "tied": False},
    ),
    "qwen3": (
        "qwen3",
        {"use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING], "head_dim": 24},
    ),
    "ministral": ("ministral", {"tied": False}),
    "ministral all layers": ("ministral", {"layer_types": [SLIDING] * 3}),
    # Caps so low that they bend these small scores and logits.
    "gemma2": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "gemma2 untied": ("gemma2", {"tied": False, "query_pre_attn_scalar": 40}),
    "gemma2 no caps": (
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "head_dim": 24,
        },
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3 scaled rope": (
        "gemma3_text",
        {
            "tied": False,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


@dataclass(frozen=True)
class Family:
    """A checkpoint, with what transformers computes for each of the sequences."""

    folder: Path
    hidden_states: list[Tensor]
    logits: list[Tensor]
    windows: list[int | None]

    @cached_property
    def answers(self) -> list[GreedyAnswer]:
        """Greedy ones to :func:`prompts`; every backend is compared with them."""
        reference = GreedyReference(str(self.folder))
        return [reference.from_ids(ids.tolist(), NUM_TOKENS) for ids in prompts()]


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 768, (length,), generator=generator) for length in LENGTHS]


def prompts() -> list[Tensor]:
    a, b, c = sequences()
    return [a[:50], b, c[:20]]


def build(folder: Path, name: str, **options: Any) -> Path:
    model_type, overrides = VARIANTS[name]
    settings: dict[str, Any] = {"num_layers": 3, "sliding_window": WINDOW, "with_tokenizer": False}
    return build_causal_lm(folder, model_type, **(settings | overrides | options))


def their_windows(model: PreTrainedModel) -> list[int | None]:
    return [layer.self_attn.sliding_window for layer in model.get_decoder().layers]


@pytest.fixture(scope="module", params=VARIANTS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = build(tmp_path_factory.mktemp("family"), request.param)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        outputs = [model(input_ids=ids[None], output_hidden_states=True) for ids in sequences()]
    return Family(
        folder,
        [output.hidden_states[-1][0] for output in outputs],
        [output.logits[0] for output in outputs],
        # Mistral's layers do not say: all of them obey the config.
        [WINDOW] * 3 if model.config.model_type == "mistral" else their_windows(model),
    )


def load(folder: Path, **options: Any) -> CausalModel:
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "block_size": 4,
        "max_model_len": MAX_LEN,
    }
    return load_model(Checkpoint.open(folder), ModelSettings(**(settings | options)))


def windows(model: CausalModel) -> list[int | None]:
    specs = [layer.spec for layer in model.attention_layers]
    return [spec.window if isinstance(spec, SlidingWindowSpec) else None for spec in specs]


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(
    "backend", ["reference", "torch", pytest.param("native", marks=needs_kernels)]
)
def test_hidden_states_and_logits_equal_transformers(family: Family, backend: str, block_size: int):
    ops = NativeLayerOps(load_kernels()) if backend == "native" else LayerOps()
    model = load(family.folder, block_size=block_size, ops=ops)
    packed = run_packed(model, sequences(), STEPS, backend=backend)
    for hidden, expected in zip(packed, family.hidden_states, strict=True):
        torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)
    for hidden, logits in zip(packed, family.logits, strict=True):
        torch.testing.assert_close(model.compute_logits(hidden), logits, atol=1e-4, rtol=1e-5)


def test_the_layers_that_slide_are_those_of_transformers(family: Family):
    assert windows(load(family.folder)) == family.windows
    assert any(family.windows)


def test_the_window_matters(family: Family):
    """Otherwise nothing in this file would show that it is obeyed."""
    model = load(family.folder)
    for layer in model.attention_layers:
        spec = layer.spec
        layer.spec = FullAttentionSpec(4, spec.num_kv_heads, spec.head_dim, spec.dtype)
    long = run_packed(model, sequences(), STEPS)[0]
    inside = slice(0, WINDOW)
    torch.testing.assert_close(long[inside], family.hidden_states[0][inside], atol=1e-4, rtol=0)
    assert (long - family.hidden_states[0]).abs().amax() > 1e-2


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_kernels)])
def test_greedy_tokens_equal_transformers(family: Family, backend: str):
    first, second, third = prompts()
    model = load(family.folder)
    run = PackedRun(model, [len(ids) + NUM_TOKENS for ids in prompts()], backend=backend)
    # The second request joins while the others decode.
    hidden = run.step([first, second[:0], third])
    answers: list[list[int]] = [[], [], []]
    while any(len(answer) < NUM_TOKENS for answer in answers):
        chunks = [second[:0]] * 3
        if not run.done[1]:
            chunks[1] = second
        for request, rows in enumerate(hidden):
            if len(rows) and len(answers[request]) < NUM_TOKENS:
                token = model.compute_logits(rows[-1:]).argmax(dim=-1)
                answers[request].append(int(token))
                chunks[request] = token
        hidden = run.step(chunks)
    for expected, answer in zip(family.answers, answers, strict=True):
        assert_greedy(expected, answer)


@pytest.fixture(scope="module", params=["gemma2", "qwen2 all layers"])
def one_pass(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[CausalModel, Tensor]]:
    folder = build(tmp_path_factory.mktemp("chunked"), request.param)
    theirs = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(input_ids=sequences()[0][None]).last_hidden_state[0]
    yield load(folder), expected


@settings(max_examples=examples(20))
@given(cuts=st.sets(st.integers(1, LENGTHS[0] - 1), max_size=10))
def test_where_a_prompt_is_cut_does_not_matter(
    one_pass: tuple[CausalModel, Tensor], cuts: set[int]
):
    model, expected = one_pass
    steps = [(end - start,) for start, end in pairwise([0, *sorted(cuts), LENGTHS[0]])]
    (hidden,) = run_packed(model, sequences()[:1], steps)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)


@needs_kernels
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_prompts_longer_than_many_windows_in_long_chunks(name: str, tmp_path: Path):
    model = load(build(tmp_path, name), max_model_len=700)
    ids = torch.randint(0, 768, (680,), generator=torch.Generator().manual_seed(5))
    (hidden,) = run_packed(model, [ids], [(300,), (379,), (1,)], backend="native")
    theirs = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(input_ids=ids[None]).last_hidden_state[0]
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["ministral", "gemma2", "gemma3"])
def test_headless_checkpoints_run(name: str, tmp_path: Path):
    folder = build(tmp_path, name, with_head=False)
    model = load(folder)
    packed = run_packed(model, sequences(), STEPS)
    with torch.inference_mode():
        theirs = AutoModel.from_pretrained(folder)
        expected = theirs(input_ids=sequences()[0][None]).last_hidden_state[0]
    torch.testing.assert_close(packed[0], expected, atol=1e-4, rtol=0)
    assert model.vocab_size == 0


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_are_scaled_as_in_transformers(name: str, dtype: torch.dtype, tmp_path: Path):
    # sqrt(72) is no number of any of these types.
    folder = build(tmp_path, name, hidden_size=72, num_heads=4, head_dim=16)
    ids = sequences()[1]
    theirs = AutoModel.from_pretrained(folder, dtype=dtype).get_input_embeddings()
    assert torch.equal(load(folder, dtype=dtype).embed(ids), theirs(ids).detach())


@pytest.mark.parametrize("name", ["mistral", "qwen2 upper layers", "gemma2", "gemma3"])
def test_a_window_that_no_sequence_outgrows_is_full_attention(name: str, tmp_path: Path):
    folder = build(tmp_path, name)
    assert windows(load(folder, max_model_len=WINDOW)) == [None] * 3
    assert WINDOW in windows(load(folder, max_model_len=WINDOW + 1))
    ids = sequences()[0][:WINDOW]
    steps = [(10,), (WINDOW - 10,)]
    narrow, full = (load(folder, max_model_len=limit) for limit in (WINDOW + 1, WINDOW))
    (a,), (b,) = run_packed(narrow, [ids], steps), run_packed(full, [ids], steps)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_window_smaller_than_a_block_is_refused(tmp_path: Path):
    folder = build(tmp_path, "gemma2")
    with pytest.raises(ValueError, match=r"window of 18 tokens is smaller than a block of 32"):
        load(folder, block_size=32)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_bidirectional_gemma_is_refused(name: str, tmp_path: Path):
    folder = build(tmp_path, name, use_bidirectional_attention=True)
    with pytest.raises(ValueError, match="bidirectional attention; only causal"):
        load(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layer_types": ["chunked_attention", FULL, FULL]},
            "layer 0 of .* is 'chunked_attention'; supported are",
        ),
        ({"layer_types": [FULL, SLIDING, FULL], "sliding_window": None}, "sliding_window is None"),
    ],
)
def test_layer_types_that_cannot_be_obeyed_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
):
    folder = build(tmp_path, "ministral", **options)
    with pytest.raises(ValueError, match=message):
        load(folder)
