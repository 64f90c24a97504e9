"""Decoders whose layers mix tokens by attention or by a recurrence: Jamba, Bamba."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from engine.attention.step import AttentionStep
from engine.layers import (
    Linear,
    Mamba2Mixer,
    MambaMixer,
    PackedLayout,
    RMSNorm,
    RotaryEmbedding,
)
from engine.models.base import CausalModel
from engine.models.hybrids.hybrid_layer import HybridLayer, HybridStep, SelfAttention
from engine.models.model_settings import ModelSettings

__all__ = ["HybridModel"]


class HybridModel(CausalModel):
    """A stack of :class:`HybridLayer` between an embedding and a head.

    Args:
        config: gives the widths; ``mamba_d_conv`` is how far the convolutions see.
        layers: made by the family.
        rotary: of the attention layers; None where they know no positions.
        settings: types and places.
        has_head: False for a headless checkpoint: ``vocab_size`` is then 0.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        layers: Sequence[HybridLayer],
        rotary: RotaryEmbedding | None,
        settings: ModelSettings,
        *,
        has_head: bool,
    ) -> None:
        super().__init__()
        self.ops = settings.ops
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size if has_head else 0
        self.input_vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.history = config.mamba_d_conv - 1
        options = settings.tensor_options
        embedding = torch.empty(config.vocab_size, config.hidden_size, **options)
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.rotary = rotary
        self.layers = nn.ModuleList(layers)
        mixers = [layer.mixer for layer in layers]
        self.attention_layers = [m.attention for m in mixers if isinstance(m, SelfAttention)]
        self.state_layers = [m.state for m in mixers if not isinstance(m, SelfAttention)]
        self.final_norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, ops=settings.ops, **options
        )
        self.tied = has_head and bool(config.tie_word_embeddings)
        self.head: Linear | None = None
        if has_head:
            shared = self.embedding if self.tied else None
            parts = {"lm_head": config.vocab_size}
            self.head = Linear(config.hidden_size, parts, weight=shared, **options)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names, each with the tensor that receives it.

        Args:
            prefix: of every name but the head's: ``"model."``, or nothing in headless
                checkpoints.
        """
        yield f"{prefix}embed_tokens.weight", self.embedding.data
        for index, layer in enumerate(self.layers):
            if isinstance(layer, HybridLayer):
                yield from layer.targets(f"{prefix}layers.{index}.")
        yield f"{prefix}final_layernorm.weight", self.final_norm.weight.data
        if self.head is not None and not self.tied:
            yield from self.head.targets("")

    def finish_loading(self, *, pack_weights: bool) -> None:
        """Derive what is derived from loaded weights; call once, after the last copy.

        Args:
            pack_weights: whether to pack every product's weight for the CPU, one at a time.
        """
        for module in self.modules():
            if isinstance(module, MambaMixer | Mamba2Mixer):
                module.finish_loading()
            elif isinstance(module, Linear) and pack_weights:
                module.pack(self.ops)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids ``(n,)`` to embeddings ``(n, hidden_size)``."""
        return F.embedding(input_ids, self.embedding)

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the layers; see :meth:`CausalModel.forward`."""
        # All groups have the same tokens.
        metadata = next(of_group for of_group in step.metadata if of_group is not None)
        layout = PackedLayout(
            metadata.query_start_loc, metadata.num_decodes, self.history, inputs_embeds.device
        )
        rotation = None if self.rotary is None else self.rotary(positions)
        shared = HybridStep(step, layout, rotation)
        # Layers add to the residual in place; the caller's embeddings are not ours to change.
        residual = inputs_embeds.clone()
        x: Tensor | None = None
        for layer in self.layers:
            x = layer(x, residual, shared)
        normed = self.final_norm(residual) if x is None else self.final_norm.add(x, residual)
        return {"hidden_states": normed}

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Rows of hidden states to float32 logits; see :meth:`CausalModel.compute_logits`."""
        if self.head is None:
            raise ValueError("this checkpoint has no language-model head: it cannot make logits")
        logits: Tensor = self.head(hidden_states)
        return logits.float()
