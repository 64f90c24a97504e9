"""Attention and recurrent layers that models call.

:class:`Attention` maps packed queries to packed outputs. :class:`StateLayer` keeps one recurrent
state per request, in pages of the shared memory. A page holds the state after one token. A request
that continues a cached state reads one page and writes another, so that the cached page stays
unchanged for the next request that hits it::

    step            reads page    writes page
    prefill, hit    5 (shared)    9
    decode          9             9             inside a block: in place
    decode          9             12            the block was full: 9 is cached under its hash
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.metadata import (
    AttentionBackend,
    AttentionMetadata,
    LayerCall,
    Scoring,
    StateMetadata,
)
from prefix_cache import AttentionSpec, LayerKVCache, MambaSpec


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Inputs of one engine step for layers with a cache or state.

    Attributes:
        backends: attention backend per group; None for groups without attention.
        metadata: metadata of the step per group; None for groups without layers.
        encoder_hidden_states: ``(encoder tokens, width)`` of the requests whose encoder ran in
            this step, packed in the step's order; cross-attention computes its keys and values
            from them. None if no encoder ran: everything needed is in the pages.
        follows_encoder: ``(num_tokens,)`` booleans, False for tokens before the position of their
            encoder's input (an image) in the prompt, or without such input. None: all True.
        shows_item: ``(num_tokens,)`` booleans, True for tokens whose embedding is a row of an
            image or another multimodal item. None: all False.
        item_features: ``(num_tokens, width)`` tower outputs for layers after the first, zeros for
            tokens without any. None: no token has any.
        token_ids: ``(num_tokens,)`` int64, for models that emit tokens; meaningless where the
            prompt provided embeddings.
        codes: ``(num_tokens, num_codebooks)`` int64 for models with several codebooks: each
            token's id and the further codes sampled with it; -1 for prompt tokens.
    """

    backends: Sequence[AttentionBackend | None]
    metadata: Sequence[AttentionMetadata | StateMetadata | None]
    encoder_hidden_states: Tensor | None = None
    follows_encoder: Tensor | None = None
    shows_item: Tensor | None = None
    item_features: Tensor | None = None
    token_ids: Tensor | None = None
    codes: Tensor | None = None


class StateLayer:
    """The states of one recurrent layer. Owns no weights; the engine binds it to its memory.

    Args:
        layer_name: unique in the model, for example ``"layers.0.mamba"``.
    """

    def __init__(self, layer_name: str, spec: MambaSpec) -> None:
        self.layer_name = layer_name
        self.spec = spec
        self._states: tuple[Tensor, ...] = ()
        self._group_id = 0

    def bind(self, states: Sequence[Tensor], group_id: int) -> None:
        """Attach a ``(num_pages, *shape)`` tensor per tensor of the spec; may be called again."""
        self._states = tuple(states)
        self._group_id = group_id

    def metadata(self, step: AttentionStep) -> StateMetadata:
        """Return this step's metadata for the layer's group."""
        metadata = step.metadata[self._group_id]
        if not isinstance(metadata, StateMetadata) or not self._states:
            raise RuntimeError(f"{self.layer_name} has no states yet; call bind first")
        return metadata

    def read(self, step: AttentionStep) -> tuple[Tensor, ...]:
        """Copy the states to continue, ``(num_reqs, *shape)`` each; zeros for new requests."""
        metadata = self.metadata(step)
        read = tuple(states.index_select(0, metadata.read_pages) for states in self._states)
        if (has_state := metadata.has_state) is None:
            return read
        return tuple(
            torch.where(has_state.view(-1, *(1,) * (each.ndim - 1)), each, each.new_zeros(()))
            for each in read
        )

    def write(self, step: AttentionStep, *states: Tensor) -> None:
        """Store the states after this step, ``(num_reqs, *shape)`` each, in the spec's order."""
        metadata = self.metadata(step)
        for kept, state in zip(self._states, states, strict=True):
            kept.index_copy_(0, metadata.write_pages, state.to(kept.dtype))


class Attention:
    """Attention of one layer over the paged cache.

    Owns no weights. The model creates it with its spec; the engine groups all specs, lays out the
    memory and then calls :meth:`bind`, after which the layer can run.

    Args:
        layer_name: unique in the model, for example ``"layers.3.self_attn"``.
        scale: factor on the scores before the softmax.
        softcap: scores become ``softcap * tanh(score / softcap)``; None: no cap.

    Attributes:
        scoring: mapping from products to scores, without the bias, which is passed per call.
        aligned_heads: cross-attention heads that align tokens with encoder rows.
        queries: queries of these heads in the last step, ``(num_tokens, heads, head_dim)``.
    """

    def __init__(
        self, layer_name: str, spec: AttentionSpec, scale: float, softcap: float | None = None
    ) -> None:
        self.layer_name = layer_name
        self.spec = spec
        self.scoring = Scoring(scale, softcap)
        self.aligned_heads: list[int] = []
        self.queries: Tensor | None = None
        self._kv_cache: LayerKVCache | None = None
        self._group_id = 0

    def bind(self, kv_cache: LayerKVCache, group_id: int) -> None:
        """Attach the layer to its part of the memory; may be called again."""
        self._kv_cache = kv_cache
        self._group_id = group_id

    def shares(self, queries: Tensor, block_ids: Sequence[int], num_rows: int) -> Tensor:
        """Compute the attention weights of the aligned heads over the first rows of some blocks.

        Maps queries ``(n, heads, head_dim)`` to ``(heads, n, num_rows)`` float32 on the CPU.
        """
        cache = self._kv_cache
        if cache is None:
            raise RuntimeError(f"{self.layer_name} has no KV cache yet; call bind first")
        chunk_ids = torch.tensor(block_ids) * cache.chunks_per_page + 2 * cache.layer_index
        keys = cache.chunks[chunk_ids.to(cache.chunks.device)].flatten(0, 1)
        keys = keys[:num_rows, self.aligned_heads].float().cpu()
        scores = torch.einsum("nhd,mhd->hnm", queries.float(), keys)
        return (scores * self.scoring.scale).softmax(dim=-1)

    def __call__(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        step: AttentionStep,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attend; see :class:`LayerCall` for the shapes."""
        if self._kv_cache is None:
            raise RuntimeError(f"{self.layer_name} has no KV cache yet; call bind first")
        backend, metadata = step.backends[self._group_id], step.metadata[self._group_id]
        if backend is None or not isinstance(metadata, AttentionMetadata):
            raise RuntimeError(f"group {self._group_id} of {self.layer_name} is not attention")
        if self.aligned_heads:
            # Not indexed by a list: it would be copied to the device, which graphs cannot record.
            self.queries = torch.stack([query[:, head] for head in self.aligned_heads], dim=1)
        scoring = self.scoring
        if bias is not None:
            fits = bias.ndim == 2 and bias.shape[0] == query.shape[1] and bias.shape[1] > 0
            if not fits or bias.dtype != torch.float32:
                raise ValueError(
                    f"expected a float32 bias ({query.shape[1]}, distances), got {bias.dtype} "
                    f"{tuple(bias.shape)}"
                )
            if not metadata.causal or metadata.visible_ends is not None:
                raise ValueError(
                    "a bias by distance needs causal attention: others have no distances"
                )
            scoring = Scoring(scoring.scale, scoring.softcap, bias)
        if key is None or value is None:
            num_written = metadata.row_mapping.shape[0]
            if num_written:
                raise ValueError(
                    f"{self.layer_name} got no keys and values, expected {num_written} to store"
                )
            key = value = query.new_empty(0, self.spec.num_kv_heads, self.spec.head_dim)
        return backend.forward(LayerCall(query, key, value, self._kv_cache, metadata, scoring))
