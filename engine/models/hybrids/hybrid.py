"""Decoders whose layers mix tokens by attention or by a recurrence: Jamba, Bamba.

One layer of a hybrid decoder, for ``n`` tokens of all requests together::

residual ──norm──► attention or Mamba ──► + ──norm──► MLP or experts ──► + (next layer's norm)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from engine.attention.layer import AttentionStep
from engine.checkpoints.quantized_weight import Target
from engine.layers import (
    GatedMLP,
    Mamba2Mixer,
    MambaMixer,
    PackedLayout,
    RotaryEmbedding,
    SparseMoE,
)
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import DecoderConfig, DecoderModel, SelfAttention, build_norm

__all__ = ["HybridLayer", "HybridModel"]


@dataclass(frozen=True, slots=True)
class HybridStep:
    """What the layers of a step share.

    Attributes:
        attention: the step's metadata for attention and state layers.
        layout: of the packed tokens, for the recurrences.
        rotation: cosines and sines of the tokens' positions; None for models without positions.
    """

    attention: AttentionStep
    layout: PackedLayout
    rotation: tuple[Tensor, Tensor] | None


class HybridLayer(nn.Module):
    """A mixer of tokens and an MLP, with their norms; see the module's picture."""

    def __init__(
        self,
        mixer: SelfAttention | MambaMixer | Mamba2Mixer,
        feed_forward: GatedMLP | SparseMoE,
        config: DecoderConfig,
        settings: ModelSettings,
    ) -> None:
        super().__init__()
        self.mixer, self.feed_forward = mixer, feed_forward
        self.input_norm = build_norm(config, settings)
        self.pre_ff_norm = build_norm(config, settings)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        mixer_name = "self_attn" if isinstance(self.mixer, SelfAttention) else "mamba"
        yield f"{prefix}input_layernorm.weight", self.input_norm.weight.data
        yield from self.mixer.targets(f"{prefix}{mixer_name}.")
        yield f"{prefix}pre_ff_layernorm.weight", self.pre_ff_norm.weight.data
        yield from self.feed_forward.targets(f"{prefix}feed_forward.")

    def forward(self, x: Tensor | None, residual: Tensor, step: HybridStep) -> Tensor:
        """Run the layer; ``residual`` is changed in place.

        Args:
            x: the layer below's MLP output, still to be added; None in the first layer.
            residual: ``(num_tokens, hidden_size)``.

        Returns:
            This layer's MLP output, not yet added to ``residual``.
        """
        normed = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        if isinstance(self.mixer, SelfAttention):
            mixed = self.mixer(normed, step.rotation, step.attention)
        else:
            mixed = self.mixer(normed, step.attention, step.layout)
        output: Tensor = self.feed_forward(self.pre_ff_norm.add(mixed, residual))
        return output


class HybridModel(DecoderModel):
    """A stack of :class:`HybridLayer` between an embedding and a head.

    Args:
        rotary: of the attention layers; None where they know no positions.
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
