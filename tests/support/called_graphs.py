"""A stand-in for CUDA graphs: replays call the recorded function, under a graph's rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from torch import Tensor

from engine.execution.decode_graphs import Forward
from engine.execution.input_batch import ModelInputs
from engine.llm import llm_engine


class CalledGraphs:
    """Records shapes and addresses of a model's inputs, and keeps its outputs at one address.

    Attributes:
        num_replays: of all engines since :func:`call_graphs`.
    """

    num_replays = 0

    def __call__(self, forward: Forward, inputs: ModelInputs) -> Forward:
        recorded = list(_places(_on_device(inputs)))
        kept = dict(forward(inputs))

        def replay(later: ModelInputs) -> Mapping[str, Tensor]:
            assert list(_places(_on_device(later))) == recorded, "inputs lie elsewhere"
            for name, rows in forward(later).items():
                kept[name].copy_(rows)
            type(self).num_replays += 1
            return kept

        return replay


def _on_device(inputs: ModelInputs) -> list[Any]:
    """Return the inputs that a graph would read; it never sees those on the host."""
    step = inputs.step
    found: list[Any] = [inputs.embeds, inputs.positions, step.token_ids, step.codes]
    for each in step.metadata:
        if is_dataclass(each):
            values = {field.name: getattr(each, field.name) for field in fields(each)}
            found += [values.get(name) for name in ("block_table", "row_mapping")]
            found += values.get("on_device") or ()
    return found


def _places(tensors: list[Any]) -> Iterator[tuple[Any, ...]]:
    for tensor in tensors:
        inner = getattr(tensor, "content", tensor)  # of a pretended device
        yield () if inner is None else (inner.data_ptr(), inner.shape, inner.stride(), inner.dtype)


def call_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines on a CPU run decode steps as if they were graphs."""
    monkeypatch.setattr(CalledGraphs, "num_replays", 0)
    monkeypatch.setattr(llm_engine, "_recorder", lambda *_: CalledGraphs())
