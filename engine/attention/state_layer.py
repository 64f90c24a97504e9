"""The recurrent layer as models see it: a state per request, in pages of the shared memory.

A page holds the state after one token. A request that continues a kept state reads one page and
writes another, so that the kept one stays as it is for the next request that hits it::

    step            reads page    writes page
    prefill, hit    5 (shared)    9
    decode          9             9             inside of a block, in place
    decode          9             12            the block was full: 9 is kept under its hash
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.metadata import StateMetadata
from engine.attention.step import AttentionStep
from prefix_cache import MambaSpec

__all__ = ["StateLayer"]


class StateLayer:
    """One recurrent layer's states. It owns no weights; the engine binds it to its memory.

    Args:
        layer_name: unique in the model, for example ``"layers.0.mamba"``.
        spec: what the layer keeps per sequence.
    """

    def __init__(self, layer_name: str, spec: MambaSpec) -> None:
        self.layer_name = layer_name
        self.spec = spec
        self._states: tuple[Tensor, ...] = ()
        self._group_id = 0

    def bind(self, states: Sequence[Tensor], group_id: int) -> None:
        """Attach the layer to its part of the memory; may be called again to rebind.

        Args:
            states: per tensor of the spec, ``(num_pages, *shape)``.
            group_id: the layer's KV-cache group.
        """
        self._states = tuple(states)
        self._group_id = group_id

    def metadata(self, step: AttentionStep) -> StateMetadata:
        """What this step says about the layer's group."""
        metadata = step.metadata[self._group_id]
        if not isinstance(metadata, StateMetadata) or not self._states:
            raise RuntimeError(f"{self.layer_name} has no states yet; call bind first")
        return metadata

    def read(self, step: AttentionStep) -> tuple[Tensor, ...]:
        """The states that the step's requests continue, zeros for those that begin.

        Returns:
            New tensors ``(num_reqs, *shape)``, in the order of the spec.
        """
        metadata = self.metadata(step)
        read = tuple(states.index_select(0, metadata.read_pages) for states in self._states)
        has_state = metadata.has_state
        if has_state is None:
            return read
        return tuple(
            torch.where(
                has_state.view(-1, *(1,) * (states.ndim - 1)),
                states,
                torch.zeros((), dtype=states.dtype, device=states.device),
            )
            for states in read
        )

    def write(self, step: AttentionStep, *states: Tensor) -> None:
        """Keep the states after this step.

        Args:
            step: the same as in :meth:`read`.
            states: ``(num_reqs, *shape)`` each, in the order of the spec.
        """
        metadata = self.metadata(step)
        for kept, state in zip(self._states, states, strict=True):
            kept.index_copy_(0, metadata.write_pages, state.to(kept.dtype))
