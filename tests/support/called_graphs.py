"""In the place of CUDA graphs: what was recorded is called again, with a graph's rules."""

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
    """Records the shapes and places of what a model gets, and keeps what it gives in one place.

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
    """What a graph would read; what is on the host it never sees."""
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
    """Let engines on a CPU run steps of decodes as if they were graphs."""
    monkeypatch.setattr(CalledGraphs, "num_replays", 0)
    monkeypatch.setattr(llm_engine, "_recorder", lambda *_: CalledGraphs())
