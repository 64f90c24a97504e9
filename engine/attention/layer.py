"""The attention layer as models see it: packed queries in, packed outputs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionMetadata
from engine.attention.distance_bias import check_bias
from engine.attention.state_layer import StateMetadata
from prefix_cache import AttentionSpec, LayerKVCache

__all__ = ["Attention", "AttentionStep"]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One engine step, as the layers that keep something need it; everything is per group.

    Attributes:
        backends: what computes a group's attention; None for groups without attention.
        metadata: what the step tells a group's layers; None for groups without layers.
        encoder_hidden_states: ``(encoder tokens, width)`` of the requests whose encoder ran in
            this step, packed in the step's order; cross-attention writes its keys and values from
            them. None when no encoder ran: all that is needed is in the pages.
        follows_encoder: ``(num_tokens,)`` booleans, False for tokens that come before the place
            of their encoder's input in the prompt (an image's), or have no such input. None: all
            tokens follow it.
        shows_item: ``(num_tokens,)`` booleans, True for tokens whose embedding is a row of an
            image or the like. None: no token's is.
    """

    backends: Sequence[AttentionBackend | None]
    metadata: Sequence[AttentionMetadata | StateMetadata | None]
    encoder_hidden_states: Tensor | None = None
    follows_encoder: Tensor | None = None
    shows_item: Tensor | None = None


class Attention:
    """One layer's attention over the paged cache.

    It owns no weights. The model creates it with its spec; the engine groups all specs, lays
    out the memory and then calls :meth:`bind`, after which the layer can run.

    Args:
        layer_name: unique in the model, for example ``"layers.3.self_attn"``.
        spec: what the layer keeps per token.
        scale: factor on the scores before the softmax.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
    """

    def __init__(
        self, layer_name: str, spec: AttentionSpec, scale: float, softcap: float | None = None
    ) -> None:
        self.layer_name = layer_name
        self.spec = spec
        self.scale = scale
        self.softcap = softcap
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
        """Attend; see :meth:`AttentionBackend.forward` for the shapes.

        Args:
            query: of the step's tokens.
            key: what this step stores; None where it stores nothing, as cross-attention does
                once its encoder has run.
            value: as ``key``.
            step: this engine step.
            bias: added to scores by distance; see :mod:`engine.attention.distance_bias`.

        Raises:
            ValueError: the bias does not fit the heads, or is meant for no causal attention; no
                keys came, but the step has slots for some.
        """
        if self._kv_cache is None:
            raise RuntimeError(f"{self.layer_name} has no KV cache yet; call bind first")
        backend, metadata = step.backends[self._group_id], step.metadata[self._group_id]
        if backend is None or not isinstance(metadata, AttentionMetadata):
            raise RuntimeError(f"group {self._group_id} of {self.layer_name} is not attention")
        if bias is not None:
            check_bias(bias, query.shape[1], metadata)
        if key is None or value is None:
            num_written = metadata.row_mapping.shape[0]
            if num_written:
                raise ValueError(
                    f"{self.layer_name} got no keys and values, expected {num_written} to store"
                )
            key = value = query.new_empty(0, self.spec.num_kv_heads, self.spec.head_dim)
        return backend.forward(
            query, key, value, self._kv_cache, metadata, self.scale, self.softcap, bias
        )
