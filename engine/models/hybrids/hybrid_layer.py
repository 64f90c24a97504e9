"""One layer of a hybrid decoder, for ``n`` tokens of all requests together::

residual ──norm──► attention or Mamba ──► + ──norm──► MLP or experts ──► + (next layer's norm)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedConfig

from engine.attention.layer import Attention
from engine.attention.step import AttentionStep
from engine.layers import (
    GatedMLP,
    Linear,
    Mamba2Mixer,
    MambaMixer,
    PackedLayout,
    RMSNorm,
    SparseMoE,
)
from engine.models.model_settings import ModelSettings
from prefix_cache import FullAttentionSpec

__all__ = ["HybridLayer", "HybridStep", "SelfAttention"]


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


class SelfAttention(nn.Module):
    """Causal self-attention over all tokens.

    Args:
        layer_name: unique in the model.
        config: gives widths and heads.
        settings: types and places.
        bias: whether the projections have biases.

    Raises:
        ValueError: query heads that key heads do not divide.
    """

    def __init__(
        self,
        layer_name: str,
        config: PreTrainedConfig,
        settings: ModelSettings,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        hidden, num_heads = config.hidden_size, config.num_attention_heads
        num_kv_heads = config.num_key_value_heads
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {num_heads} and {num_kv_heads}"
            )
        self.num_heads = num_heads
        self.head_dim = getattr(config, "head_dim", None) or hidden // num_heads
        query_size, kv_size = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.kv_start = query_size + kv_size
        self.ops = settings.ops
        options = settings.tensor_options
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = Linear(hidden, parts, bias=bias, **options)
        self.output = Linear(query_size, {"o_proj": hidden}, bias=bias, **options)
        spec = FullAttentionSpec(settings.block_size, num_kv_heads, self.head_dim, settings.dtype)
        self.attention = Attention(layer_name, spec, self.head_dim**-0.5)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        yield from self.qkv.targets(prefix)
        yield from self.output.targets(prefix)

    def forward(self, x: Tensor, step: HybridStep) -> Tensor:
        """Attend with ``(num_tokens, hidden_size)``; the result has the same shape."""
        num_tokens = x.shape[0]
        qkv = self.qkv(x)
        heads = qkv[:, : self.kv_start].view(num_tokens, -1, self.head_dim)
        value = qkv[:, self.kv_start :].view(num_tokens, -1, self.head_dim)
        if step.rotation is not None:
            self.ops.rotate(heads, *step.rotation)
        query, key = heads[:, : self.num_heads], heads[:, self.num_heads :]
        attended = self.attention(query, key, value, step.attention)
        projected: Tensor = self.output(attended.reshape(num_tokens, -1))
        return projected


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
        config: PreTrainedConfig,
        settings: ModelSettings,
    ) -> None:
        super().__init__()
        self.mixer, self.feed_forward = mixer, feed_forward
        self.input_norm, self.pre_ff_norm = (
            RMSNorm(
                config.hidden_size,
                config.rms_norm_eps,
                ops=settings.ops,
                **settings.tensor_options,
            )
            for _ in range(2)
        )

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
            mixed = self.mixer(normed, step)
        else:
            mixed = self.mixer(normed, step.attention, step.layout)
        output: Tensor = self.feed_forward(self.pre_ff_norm.add(mixed, residual))
        return output
