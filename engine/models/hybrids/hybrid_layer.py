"""One layer of a hybrid decoder, for ``n`` tokens of all requests together::

residual ──norm──► attention or Mamba ──► + ──norm──► MLP or experts ──► + (next layer's norm)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from engine.attention.step import AttentionStep
from engine.layers import GatedMLP, Mamba2Mixer, MambaMixer, PackedLayout, SparseMoE
from engine.models.decoders.decoder_config import DecoderConfig
from engine.models.decoders.decoder_layer import build_norm
from engine.models.decoders.self_attention import SelfAttention
from engine.models.model_settings import ModelSettings

__all__ = ["HybridLayer", "HybridStep"]


@dataclass(frozen=True, slots=True)
class HybridStep:
    """What the layers of a step share.

    Attributes:
        attention: what attention and state layers are told of the step.
        layout: of the packed tokens, for the recurrences.
        rotation: cosines and sines of the tokens' positions; None for models without positions.
    """

    attention: AttentionStep
    layout: PackedLayout
    rotation: tuple[Tensor, Tensor] | None


class HybridLayer(nn.Module):
    """A mixer of tokens and an MLP, with their norms; see the module's picture.

    Args:
        mixer: attention or a recurrence.
        feed_forward: an MLP or a mixture of them.
        config: gives width and epsilon of the norms.
        settings: types and places.
    """

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

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
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
            step: what the layers share.

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
