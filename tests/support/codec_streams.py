"""Codecs that generate sound in chunks with a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.interface.config import GenerationParams
from engine.models.base import CodeChunk

PARAMS = GenerationParams()


def in_chunks(codec: Any, codes: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the samples of codes that come in chunks of these lengths."""
    state, start, pieces = codec.new_state(), 0, []
    for piece in codes.split(list(lengths)):
        (samples,), (state,) = codec.generate([CodeChunk(piece, start, None, state)], PARAMS)
        assert len(samples) == len(piece) * codec.samples_per_code
        pieces.append(samples)
        start += len(piece)
    return torch.cat(pieces)


def run_together(codec: Any, make: Callable[[int, int], Tensor], heard: Sequence[int]) -> list[Any]:
    """Run three codes of several utterances at once; check the samples of each.

    Args:
        codec: the codec.
        make: makes codes from their number and a seed.
        heard: the number of codes of each utterance that are computed before.

    Returns:
        The states after the codes.
    """
    chunks, expected = [], []
    for seed, start in enumerate(heard):
        codes, state = make(start + 3, seed), codec.new_state()
        if start:
            _, (state,) = codec.generate([CodeChunk(codes[:start], 0, None, state)], PARAMS)
        chunks.append(CodeChunk(codes[start:], start, None, state))
        expected.append(in_chunks(codec, codes, [start + 3])[-3 * codec.samples_per_code :])
    samples, states = codec.generate(chunks, PARAMS)
    for made, alone in zip(samples, expected, strict=True):
        torch.testing.assert_close(made, alone, atol=1e-5, rtol=0)
    again, _ = codec.generate(chunks, PARAMS)  # the states are unchanged
    assert all(torch.equal(a, b) for a, b in zip(samples, again, strict=True))
    return list(states)
