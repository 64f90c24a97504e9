"""Recurrent layers against transformers' modules, for any packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import BambaConfig, JambaConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from engine.attention.layer import AttentionStep
from engine.attention.metadata import StateMetadata
from engine.attention.packed_layout import Chunks, PackedLayout
from engine.layers import DeltaRuleMixer, Mamba2Mixer, MambaMixer
from engine.layers.delta_rule import delta_scan
from engine.layers.mamba import ssd_scan
from tests.support.examples import examples

HIDDEN = 32
CPU = torch.device("cpu")
JAMBA = JambaConfig(
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_experts=5,
    num_experts_per_tok=2,
    mamba_d_state=8,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_dt_rank=4,
)
BAMBA = BambaConfig(
    hidden_size=HIDDEN,
    num_hidden_layers=1,
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_n_groups=2,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=16,
)
QWEN3_NEXT = Qwen3NextConfig(
    hidden_size=HIDDEN,
    num_hidden_layers=1,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
Mixer = MambaMixer | Mamba2Mixer | DeltaRuleMixer
KINDS = ("mamba", "mamba2", "delta_rule")


def build_mixer(kind: str, dtype: torch.dtype) -> Mixer:
    if kind == "mamba":
        return MambaMixer("m", JAMBA, 4, dtype=dtype, device=CPU)
    if kind == "mamba2":
        return Mamba2Mixer("m", BAMBA, 4, dtype=dtype, device=CPU)
    return DeltaRuleMixer("m", QWEN3_NEXT, 4, dtype=dtype, device=CPU)


@dataclass(frozen=True)
class Pair:
    """A mixer and transformers' module with the same weights."""

    mixer: Mixer
    theirs: nn.Module


@cache
def pair(kind: str) -> Pair:
    theirs: nn.Module
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        if kind == "mamba":
            theirs = JambaMambaMixer(JAMBA, 0).eval()
        elif kind == "mamba2":
            theirs = BambaMixer(BAMBA, 0).eval()
        else:
            theirs = Qwen3NextGatedDeltaNet(QWEN3_NEXT, 0).eval()
        mixer = build_mixer(kind, torch.float32)
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
                if name == "A_log":
                    # Include slow decays, else nothing is remembered for long.
                    parameter.sub_(torch.rand_like(parameter), alpha=3)
    copy_weights(mixer, theirs)
    mixer.finish_loading()
    return Pair(mixer, theirs)


def copy_weights(ours: Mixer, theirs: nn.Module) -> None:
    targets = dict(ours.targets(""))
    weights = theirs.state_dict()
    assert targets.keys() == weights.keys()
    for name, target in targets.items():
        target.copy_(weights[name])


@torch.inference_mode()
def run_mixer(
    mixer: Mixer, sequences: Sequence[Tensor], steps: Sequence[Sequence[tuple[int, int]]]
) -> list[Tensor]:
    """Run steps of ``(request, number of tokens)``, decodes first.

    Every request has two pages: even requests stay in the first, odd ones switch at every step.
    """
    num_pages = 1 + 2 * len(sequences)
    states = [
        torch.full((num_pages, *kept.shape), torch.nan, dtype=kept.dtype)
        for kept in mixer.state.spec.states
    ]
    mixer.state.bind(states, 0)
    done, moves = [0] * len(sequences), [0] * len(sequences)
    rows: list[list[Tensor]] = [[] for _ in sequences]
    for batch in steps:
        requests, counts = [r for r, _ in batch], [count for _, count in batch]
        read = [1 + 2 * r + moves[r] % 2 for r in requests]
        write = [1 + 2 * r + (moves[r] + r) % 2 for r in requests]
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        metadata = StateMetadata(
            layout=PackedLayout(starts, counts.count(1), CPU),
            read_pages=torch.tensor(read),
            write_pages=torch.tensor(write),
            has_state=torch.tensor([done[r] > 0 for r in requests]),
        )
        x = torch.cat([sequences[r][done[r] : done[r] + count] for r, count in batch])
        mixed = mixer(x, AttentionStep([None], [metadata]))
        for (r, count), part in zip(batch, mixed.split(counts), strict=True):
            rows[r].append(part)
            done[r] += count
            moves[r] += r % 2
    return [torch.cat(parts) for parts in rows]


def check_mixer(kind: str, steps: Sequence[Sequence[tuple[int, int]]]) -> None:
    lengths: dict[int, int] = {}
    for batch in steps:
        for r, count in batch:
            lengths[r] = lengths.get(r, 0) + count
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randn(lengths[r], HIDDEN, generator=generator) for r in range(len(lengths))]
    both = pair(kind)
    for x, mixed in zip(sequences, run_mixer(both.mixer, sequences, steps), strict=True):
        with torch.inference_mode():
            expected = both.theirs(x[None])[0]
        torch.testing.assert_close(mixed, expected, atol=2e-5, rtol=1e-4)


@st.composite
def packed_steps(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Draw requests that start at different steps, in chunks of any size, packed in any order."""
    queues = draw(
        st.lists(
            st.lists(st.one_of(st.just(1), st.integers(1, 21)), min_size=1, max_size=5),
            min_size=1,
            max_size=4,
        )
    )
    starts = [draw(st.integers(0, 3)) for _ in queues]
    steps = []
    for step in range(8):
        batch = [
            (r, queue[step - start])
            for r, (queue, start) in enumerate(zip(queues, starts, strict=True))
            if 0 <= step - start < len(queue)
        ]
        shuffled = draw(st.permutations(batch))
        steps.append(sorted(shuffled, key=lambda item: item[1] != 1))
    return [batch for batch in steps if batch]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(40), deadline=None)
@given(steps=packed_steps())
def test_packing_does_not_change_results(kind: str, steps: list[list[tuple[int, int]]]):
    check_mixer(kind, steps)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_longer_than_a_chunk_of_the_scan(kind: str):
    check_mixer(kind, [[(2, 1), (0, 150), (1, 64)], [(1, 1), (2, 65), (0, 70)]])


@pytest.mark.parametrize("kind", KINDS)
def test_the_recurrence_is_float32_in_a_bfloat16_model(kind: str):
    mixer = build_mixer(kind, torch.bfloat16)
    assert [kept.dtype for kept in mixer.state.spec.states] == [torch.bfloat16, torch.float32]
    copy_weights(mixer, pair(kind).theirs)
    mixer.finish_loading()
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(2))
    steps = [[(0, 12)], [(0, 1)], [(0, 7)]]
    (mixed,) = run_mixer(mixer, [x.bfloat16()], steps)
    (exact,) = run_mixer(pair(kind).mixer, [x], steps)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), exact, atol=0.05 * float(exact.abs().max()), rtol=0)


def test_a_strong_decay_does_not_blur_the_weak_ones_after_it():
    generator = torch.Generator().manual_seed(0)
    length, heads, head_dim, size = 50, 2, 3, 4
    a = -0.01 * torch.rand(length, heads, generator=generator)
    a[::7] = -3000.0
    x = torch.randn(length, heads, head_dim, generator=generator)
    b, c = torch.randn(2, length, 1, size, generator=generator)
    before = torch.randn(1, heads, head_dim, size, generator=generator)
    y, after = ssd_scan((x, a, b, c), before, Chunks.of(torch.tensor([length]), CPU))

    h = before[0].double()
    for t in range(length):
        h = h * a[t].double().exp()[:, None, None] + x[t].double()[..., None] * b[t].double()
        torch.testing.assert_close(y[t].double(), (h * c[t].double()).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after[0].double(), h, atol=1e-5, rtol=1e-5)


def test_the_delta_rule_in_chunks_is_the_recurrence_where_keys_repeat_and_a_token_is_not_finite():
    """With equal keys, the products within a chunk nearly cancel."""
    generator = torch.Generator().manual_seed(0)
    length, heads, key_dim, value_dim, spoilt = 150, 2, 8, 6, 140
    q, k = torch.randn(2, length, heads, key_dim, generator=generator)
    k = torch.nn.functional.normalize(k + 3.0, dim=-1)
    v = torch.randn(length, heads, value_dim, generator=generator)
    g = -0.01 * torch.rand(length, heads, generator=generator)
    g[::7] = -3000.0
    beta = torch.rand(length, heads, generator=generator)
    before = torch.randn(1, heads, key_dim, value_dim, generator=generator)
    k[spoilt] = v[spoilt] = torch.nan
    chunks = Chunks.of(torch.tensor([length]), CPU)
    y, _ = delta_scan((q, k, v, g, beta), before, chunks)

    q, k, v, g, beta, h = (each.double() for each in (q, k, v, g, beta, before[0]))
    for t in range(spoilt):
        h = h * g[t].exp()[:, None, None]
        found = (k[t, :, None] @ h).squeeze(1)
        h = h + k[t, ..., None] * (beta[t, :, None] * (v[t] - found))[:, None]
        expected = (q[t, :, None] @ h).squeeze(1)
        torch.testing.assert_close(y[t].double(), expected, atol=1e-5, rtol=1e-5)
    assert y[spoilt:].isnan().all()
