"""The attention layer as models see it: packed queries in, packed outputs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionMetadata
from prefix_cache import KVCacheSpec, LayerKVCache

__all__ = ["Attention", "AttentionStep"]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One engine step, as attention layers need it: one backend and one metadata per group."""

    backends: Sequence[AttentionBackend]
    metadata: Sequence[AttentionMetadata]


class Attention:
    """One layer's attention over the paged cache.

    It owns no weights. The model creates it with its spec; the engine groups all specs, lays
    out the memory and then calls :meth:`bind`, after which the layer can run.

    Args:
        layer_name: unique in the model, for example ``"layers.3.self_attn"``.
        spec: what the layer keeps per token.
        scale: factor on the scores before the softmax.
    """

    def __init__(self, layer_name: str, spec: KVCacheSpec, scale: float) -> None:
        self.layer_name = layer_name
        self.spec = spec
        self.scale = scale
        self._kv_cache: LayerKVCache | None = None
        self._group_id = 0

    def bind(self, kv_cache: LayerKVCache, group_id: int) -> None:
        """Attach the layer to its part of the memory; may be called again to rebind."""
        self._kv_cache = kv_cache
        self._group_id = group_id

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, step: AttentionStep) -> Tensor:
        """Attend; see :meth:`AttentionBackend.forward` for the shapes."""
        if self._kv_cache is None:
            raise RuntimeError(f"{self.layer_name} has no KV cache yet; call bind first")
        return step.backends[self._group_id].forward(
            query, key, value, self._kv_cache, step.metadata[self._group_id], self.scale
        )
