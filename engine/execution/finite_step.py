"""Finds the requests for which a step made NaN or infinity, before anything of it is published.

Looked at are the rows of every request (the last layer's, and what else is mirrored), and the keys
and values of every block that the step has filled. That is all that others can ever hit:

- keys and values themselves, because a kernel may pass over a bad key: one of minus infinity has no
  weight, and some give zeros where no key has any;
- states of recurrent layers through the rows: no softmax stands between them, and sums, products
  and norms make NaN or infinity of every number that is not finite, up to the last layer;
- blocks of earlier steps were looked at in theirs.

A block that is not full yet is looked at when it is; until then its request alone reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.execution.input_batch import StepInputs
from engine.resources.finite_numbers import are_finite, total
from prefix_cache import AttentionSpec, CrossAttentionSpec, PagedMemory

__all__ = ["FilledPage", "FiniteStep", "PageContents"]


@dataclass(frozen=True, slots=True)
class FilledPage:
    """A page that a step has filled to its end.

    Attributes:
        place: of its request in the step.
        group_id: the KV-cache group.
        page_id: the page.
    """

    place: int
    group_id: int
    page_id: int


class PageContents:
    """The pages of attention groups as what is in them, without what pads them.

    Args:
        memory: the pages.
    """

    def __init__(self, memory: PagedMemory) -> None:
        self._specs: dict[int, AttentionSpec] = {}
        self._pages: dict[int, Tensor] = {}
        for group_id, group in enumerate(memory.config.groups):
            if isinstance(group.spec, AttentionSpec):
                layer = memory.layer(group_id, 0)
                pages = layer.chunks.unflatten(0, (-1, layer.chunks_per_page))
                self._specs[group_id] = group.spec
                self._pages[group_id] = pages[:, : 2 * len(group.layer_names)].flatten(1)

    def filled(self, step: StepInputs, runs_encoder: Sequence[bool]) -> list[FilledPage]:
        """The pages that a step fills; those of an encoder's input all at once.

        Args:
            step: its inputs.
            runs_encoder: per request, whether its encoder's keys and values come with the step.
        """
        found = []
        for group_id, spec in self._specs.items():
            size, table = spec.block_size, step.groups[group_id].block_table
            if isinstance(spec, CrossAttentionSpec):
                first = np.zeros_like(step.encoder_lens)
                stop = np.where(runs_encoder, -(-step.encoder_lens // size), 0)
            else:
                first, stop = step.num_computed_tokens // size, step.seq_lens // size
            for place in (stop > first).nonzero()[0].tolist():
                ids = table[place, first[place] : stop[place]].tolist()
                found += [FilledPage(place, group_id, page_id) for page_id in ids]
        return found

    def numbers(self, pages: Sequence[FilledPage]) -> list[Tensor]:
        """Keys and values of pages: views on a CPU; on other devices few kernels gather them."""
        if not pages:
            return []
        if self._pages[pages[0].group_id].is_cpu:
            return [self._pages[page.group_id][page.page_id] for page in pages]
        gathered = []
        for group_id, contents in self._pages.items():
            ids = [page.page_id for page in pages if page.group_id == group_id]
            if ids:
                index = torch.tensor(ids, device=contents.device)
                gathered.append(contents.index_select(0, index))
        return gathered


@dataclass(frozen=True, slots=True, eq=False)
class FiniteStep:
    """What a step made, and whether all of it is finite: asked of the device, not waited for.

    Attributes:
        rows: ``name -> (num_tokens, ...)``.
        contents: the pages.
        filled: those that the step has filled.
        sum: of all that is looked at, a scalar on its device.
    """

    rows: Mapping[str, Tensor]
    contents: PageContents
    filled: Sequence[FilledPage]
    sum: Tensor

    @classmethod
    def of(
        cls, rows: Mapping[str, Tensor], contents: PageContents, filled: Sequence[FilledPage]
    ) -> FiniteStep:
        """Queue the sum behind what makes the rows."""
        return cls(rows, contents, filled, total([*rows.values(), *contents.numbers(filled)]))

    def errors(self, query_start_loc: Sequence[int]) -> dict[int, str]:
        """What is wrong with the requests of which something is not finite; as a rule nothing.

        Args:
            query_start_loc: ``num_reqs + 1`` numbers: where each request's rows begin.

        Returns:
            Messages by the requests' places in the step.
        """
        if math.isfinite(self.sum.item()):
            return {}
        found: dict[int, list[str]] = {}
        for name, rows in self.rows.items():
            is_finite = rows.isfinite().reshape(len(rows), -1).all(1).cpu()
            for place, start in enumerate(query_start_loc[:-1]):
                if not is_finite[start : query_start_loc[place + 1]].all():
                    found.setdefault(place, []).append(name)
        for place in sorted({page.place for page in self.filled}):
            pages = [page for page in self.filled if page.place == place]
            if not are_finite(self.contents.numbers(pages)):
                found.setdefault(place, []).append("keys or values")
        return {
            place: f"the model's {' and '.join(names)} are NaN or infinite for some of its tokens"
            for place, names in found.items()
        }
