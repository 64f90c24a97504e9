"""Attention among neighbouring blocks equals attention under a mask of all pairs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from engine.models.qwen2_5_omni.code2wav import neighbour_attention


@given(
    length=st.integers(1, 23),
    block_size=st.integers(1, 6),
    backward=st.integers(0, 1),
    ahead=st.integers(0, 1),
    batch=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_it_equals_masked_attention(length, block_size, backward, ahead, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, 2, length, 8, generator=generator) for _ in range(3))
    block = torch.arange(length) // block_size
    distance = block[None, :] - block[:, None]
    seen = (distance >= -backward) & (distance <= ahead)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    found, weights = neighbour_attention(
        _module(block_size),
        query,
        key,
        value,
        torch.tensor([backward == 1, True, ahead == 1]),
        is_causal=False,
    )
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=1e-5, rtol=0)
    assert weights is None


@pytest.mark.parametrize("sees", [(False, True, False), (True, True, False), (True, True, True)])
def test_of_many_blocks_each_is_scored_with_its_neighbours_alone(
    monkeypatch: pytest.MonkeyPatch, sees: tuple[bool, ...]
):
    block_size, scores = 4, F.scaled_dot_product_attention
    asked: list[tuple[int, int]] = []

    def note(query: torch.Tensor, key: torch.Tensor, *others, **named):
        asked.append((query.shape[2], key.shape[2]))
        return scores(query, key, *others, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    rows = torch.randn(1, 2, 40 * block_size - 1, 8)
    neighbour_attention(_module(block_size), rows, rows, rows, torch.tensor(sees))
    assert asked == [(block_size, sum(sees) * block_size)]


def _module(block_size: int) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(block_size=block_size))
