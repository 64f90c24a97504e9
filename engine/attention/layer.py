"""The attention layer as models see it: packed queries in, packed outputs out."""

from __future__ import annotations

from torch import Tensor

from engine.attention.backend import LayerCall
from engine.attention.metadata import AttentionMetadata
from engine.attention.scoring import Scoring, check_bias
from engine.attention.step import AttentionStep
from prefix_cache import AttentionSpec, LayerKVCache

__all__ = ["Attention"]


class Attention:
    """One layer's attention over the paged cache.

    It owns no weights. The model creates it with its spec; the engine groups all specs, lays
    out the memory and then calls :meth:`bind`, after which the layer can run.

    Args:
        layer_name: unique in the model, for example ``"layers.3.self_attn"``.
        spec: what the layer keeps per token.
        scale: factor on the scores before the softmax.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.

    Attributes:
        scoring: how products become scores, but for a bias, which comes with a call.
    """

    def __init__(
        self, layer_name: str, spec: AttentionSpec, scale: float, softcap: float | None = None
    ) -> None:
        self.layer_name = layer_name
        self.spec = spec
        self.scoring = Scoring(scale, softcap)
        self._kv_cache: LayerKVCache | None = None
        self._group_id = 0

    def bind(self, kv_cache: LayerKVCache, group_id: int) -> None:
        """Attach the layer to its part of the memory; may be called again to rebind."""
        self._kv_cache = kv_cache
        self._group_id = group_id

    def __call__(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        step: AttentionStep,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attend; see :class:`LayerCall` for the shapes.

        Args:
            query: of the step's tokens.
            key: what this step stores; None in cross-attention whose encoder does not run.
            value: as ``key``.
            step: this engine step.
            bias: added to scores by distance; see :mod:`engine.attention.scoring`.

        Raises:
            ValueError: the bias does not fit; no keys came, but the step has slots for some.
        """
        if self._kv_cache is None:
            raise RuntimeError(f"{self.layer_name} has no KV cache yet; call bind first")
        backend, metadata = step.backends[self._group_id], step.metadata[self._group_id]
        if backend is None or not isinstance(metadata, AttentionMetadata):
            raise RuntimeError(f"group {self._group_id} of {self.layer_name} is not attention")
        scoring = self.scoring
        if bias is not None:
            check_bias(bias, query.shape[1], metadata)
            scoring = Scoring(scoring.scale, scoring.softcap, bias)
        if key is None or value is None:
            num_written = metadata.row_mapping.shape[0]
            if num_written:
                raise ValueError(
                    f"{self.layer_name} got no keys and values, expected {num_written} to store"
                )
            key = value = query.new_empty(0, self.spec.num_kv_heads, self.spec.head_dim)
        return backend.forward(LayerCall(query, key, value, self._kv_cache, metadata, scoring))
