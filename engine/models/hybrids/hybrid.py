"""Decoders whose layers mix tokens by attention or by a recurrence: Jamba, Bamba."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.attention.step import AttentionStep
from engine.layers import PackedLayout, RotaryEmbedding
from engine.models.decoders.decoder import DecoderModel
from engine.models.decoders.decoder_config import DecoderConfig
from engine.models.decoders.self_attention import SelfAttention
from engine.models.hybrids.hybrid_layer import HybridLayer, HybridStep
from engine.models.model_settings import ModelSettings

__all__ = ["HybridModel"]


class HybridModel(DecoderModel):
    """A stack of :class:`HybridLayer` between an embedding and a head.

    Args:
        config: the normalised config.
        layers: made by the family.
        rotary: of the attention layers; None where they know no positions.
        settings: types and places.
        kernel_size: tokens that the convolutions see, a token's own included.
        has_head: False for a headless checkpoint: ``vocab_size`` is then 0.
    """

    final_norm_name = "final_layernorm"

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[HybridLayer],
        rotary: RotaryEmbedding | None,
        settings: ModelSettings,
        *,
        kernel_size: int,
        has_head: bool,
    ) -> None:
        rotaries = () if rotary is None else (rotary,)
        super().__init__(config, rotaries, settings, has_head=has_head, layers=layers)
        self.history = kernel_size - 1
        mixers = [layer.mixer for layer in layers]
        self.attention_layers = [m.attention for m in mixers if isinstance(m, SelfAttention)]
        self.state_layers = [m.state for m in mixers if not isinstance(m, SelfAttention)]

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the layers; see :meth:`CausalModel.forward`."""
        # All groups have the same tokens.
        metadata = next(of_group for of_group in step.metadata if of_group is not None)
        layout = PackedLayout(
            metadata.query_start_loc, metadata.num_decodes, self.history, inputs_embeds.device
        )
        rotation = next((rotary(positions) for rotary in self.rotaries), None)
        shared = HybridStep(step, layout, rotation)
        return self.run_layers(inputs_embeds, [(shared,)] * len(self.layers))
