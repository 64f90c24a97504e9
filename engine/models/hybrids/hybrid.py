"""Decoders whose layers mix tokens by attention or by a recurrence.

Jamba has Mamba-1 layers, attention without positions among them, and experts in some of the MLPs;
Bamba has Mamba-2 layers, and attention layers that rotate half of each head's channels; Qwen3-Next
and Qwen3.5 have layers of the gated delta rule, gated attention, and experts with a shared one, or
none. One layer::

    residual ──norm──► attention or a state ──► + ──norm──► MLP or experts ──► + (next layer's norm)

Sources: Lieber et al., "Jamba: A Hybrid Transformer-Mamba Language Model", 2024; IBM, Princeton,
CMU and UIUC, "Bamba: Inference-Efficient Hybrid Mamba2 Model", 2024; transformers' ``qwen3_next``
and ``qwen3_5``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from transformers import PreTrainedConfig

from engine.attention.layer import AttentionStep
from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import Target
from engine.layers import (
    DeltaRuleConfig,
    DeltaRuleMixer,
    ExpertsConfig,
    GatedMLP,
    Mamba2Config,
    Mamba2Mixer,
    MambaConfig,
    MambaMixer,
    PackedLayout,
    RotaryEmbedding,
    SparseMoE,
)
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import (
    DecoderConfig,
    DecoderModel,
    LayerKind,
    SelfAttention,
    build_mlp,
    build_norm,
    build_rotary,
)
from engine.models.decoders.families import llama_config, qwen3_moe_config
from engine.models.family import ModelFamily, has_head

StateMixer: TypeAlias = MambaMixer | Mamba2Mixer | DeltaRuleMixer


class LayerNames(NamedTuple):
    """What checkpoints call the parts of a layer, and the last norm."""

    state_mixer: str = "mamba"
    feed_forward_norm: str = "pre_ff_layernorm"
    feed_forward: str = "feed_forward"
    final_norm: str = "final_layernorm"


_MAMBA_NAMES = LayerNames()


class HybridLayer(nn.Module):
    """A mixer of tokens and an MLP, with their norms; see the module's picture."""

    def __init__(
        self,
        mixer: SelfAttention | StateMixer,
        feed_forward: GatedMLP | SparseMoE,
        config: DecoderConfig,
        settings: ModelSettings,
        names: LayerNames,
    ) -> None:
        super().__init__()
        self.mixer, self.feed_forward, self.names = mixer, feed_forward, names
        self.input_norm = build_norm(config, settings)
        self.pre_ff_norm = build_norm(config, settings)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        names, is_attention = self.names, isinstance(self.mixer, SelfAttention)
        mixer_name = "self_attn" if is_attention else names.state_mixer
        yield f"{prefix}input_layernorm.weight", self.input_norm.weight.data
        yield from self.mixer.targets(f"{prefix}{mixer_name}.")
        yield f"{prefix}{names.feed_forward_norm}.weight", self.pre_ff_norm.weight.data
        yield from self.feed_forward.targets(f"{prefix}{names.feed_forward}.")

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        step: AttentionStep,
        layout: PackedLayout,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Run the layer; ``residual`` is changed in place.

        Args:
            x: the layer below's MLP output, still to be added; None in the first layer.
            residual: ``(num_tokens, hidden_size)``.
            layout: of the packed tokens, for the recurrences.
            rotation: cosines and sines of their positions; None for models without positions.

        Returns:
            This layer's MLP output, not yet added to ``residual``.
        """
        normed = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        if isinstance(self.mixer, SelfAttention):
            mixed = self.mixer(normed, rotation, step)
        else:
            mixed = self.mixer(normed, step, layout)
        output: Tensor = self.feed_forward(self.pre_ff_norm.add(mixed, residual))
        return output


class HybridModel(DecoderModel):
    """A stack of :class:`HybridLayer` between an embedding and a head.

    Args:
        rotary: of the attention layers; None where they know no positions.
        has_head: False for a headless checkpoint: ``vocab_size`` is then 0.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[HybridLayer],
        rotary: RotaryEmbedding | None,
        settings: ModelSettings,
        *,
        has_head: bool,
    ) -> None:
        rotaries = () if rotary is None else (rotary,)
        super().__init__(config, rotaries, settings, has_head=has_head, layers=layers)
        self.final_norm_name = layers[0].names.final_norm
        mixers = [layer.mixer for layer in layers]
        self.attention_layers = [m.attention for m in mixers if isinstance(m, SelfAttention)]
        recurrent = [m for m in mixers if not isinstance(m, SelfAttention)]
        self.state_layers = [m.state for m in recurrent]
        # Earlier tokens that convolutions see, the same in all layers.
        self.history = max((m.conv.state_shape[0] for m in recurrent), default=0)

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
        return self.run_layers(inputs_embeds, [(step, layout, rotation)] * len(self.layers))


def build_jamba(checkpoint: Checkpoint, settings: ModelSettings) -> HybridModel:
    """Build a Jamba, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    decoder = DecoderConfig.from_transformers(config)
    mamba = _mamba_settings(config) | {
        "inner_size": config.mamba_expand * config.hidden_size,
        "dt_rank": config.mamba_dt_rank,
    }

    def mixer(index: int) -> MambaMixer:
        name, options = f"layers.{index}.mamba", settings.tensor_options
        return MambaMixer(
            name, MambaConfig(**mamba), settings.block_size, ops=settings.ops, **options
        )

    # One expert is a plain MLP, without a router.
    experts = [
        ExpertsConfig(count, config.num_experts_per_tok, config.intermediate_size, router="router")
        if count > 1
        else None
        for count in config.layers_num_experts
    ]
    decoder = replace(decoder, layers=tuple(LayerKind(experts=each) for each in experts))
    layers = _build_layers(config, settings, decoder, mixer)
    return HybridModel(decoder, layers, None, settings, has_head=has_head(checkpoint))


def build_bamba(checkpoint: Checkpoint, settings: ModelSettings) -> HybridModel:
    """Build a Bamba, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    if config.time_step_limit is None:
        raise ValueError("time_step_limit must be two numbers (0 and infinity for none), got null")
    least, greatest = config.time_step_limit
    mamba = _mamba_settings(config) | {
        "num_heads": config.mamba_n_heads,
        "head_dim": config.mamba_d_head,
        "num_groups": config.mamba_n_groups,
        "dt_limit": (least, greatest),
    }

    def mixer(index: int) -> Mamba2Mixer:
        name, options = f"layers.{index}.mamba", settings.tensor_options
        return Mamba2Mixer(name, Mamba2Config(**mamba), settings.block_size, **options)

    decoder, rotary = llama_config(config), build_rotary(config, settings)
    layers = _build_layers(config, settings, decoder, mixer)
    return HybridModel(decoder, layers, rotary, settings, has_head=has_head(checkpoint))


def build_qwen3_next(checkpoint: Checkpoint, settings: ModelSettings) -> HybridModel:
    """Build a Qwen3-Next, its weights not yet loaded; see :data:`Builder`."""
    rotary = build_rotary(checkpoint.config, settings)
    decoder = delta_config(checkpoint.config)
    return build_delta(checkpoint.config, settings, decoder, rotary, has_head=has_head(checkpoint))


def build_qwen3_5(checkpoint: Checkpoint, settings: ModelSettings) -> HybridModel:
    """Build a Qwen3.5 without its tower, its weights not yet loaded; see :data:`Builder`."""
    config, head = checkpoint.config, has_head(checkpoint)
    rotary, decoder = build_rotary(config, settings), delta_config(config)
    return build_delta(config, settings, decoder, rotary, has_head=head, interleaved=False)


def delta_config(config: PreTrainedConfig, **declared: Any) -> DecoderConfig:
    """Read what a decoder of gated delta rules and gated attention is like.

    Args:
        **declared: what else its experts may say, if it has any.
    """
    shared_size = getattr(config, "shared_expert_intermediate_size", 0)
    decoder = qwen3_moe_config(config, shared_size=shared_size, **declared)
    return replace(decoder, norm_offset=1.0, attention_gate=True)


def build_delta(
    config: PreTrainedConfig,
    settings: ModelSettings,
    decoder: DecoderConfig,
    rotary: RotaryEmbedding,
    *,
    has_head: bool,
    interleaved: bool = True,
) -> HybridModel:
    """Build a decoder of gated delta rules, its weights not yet loaded.

    Args:
        interleaved: see :class:`~engine.layers.DeltaRuleConfig`.
    """
    delta = DeltaRuleConfig(
        hidden_size=config.hidden_size,
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel_size=config.linear_conv_kernel_dim,
        activation=config.hidden_act,
        norm_eps=config.rms_norm_eps,
        interleaved=interleaved,
    )

    def mixer(index: int) -> DeltaRuleMixer:
        name, options = f"layers.{index}.linear_attn", settings.tensor_options
        return DeltaRuleMixer(name, delta, settings.block_size, **options)

    names = LayerNames("linear_attn", "post_attention_layernorm", "mlp", "norm")
    layers = _build_layers(config, settings, decoder, mixer, names)
    return HybridModel(decoder, layers, rotary, settings, has_head=has_head)


def _mamba_settings(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "state_size": config.mamba_d_state,
        "kernel_size": config.mamba_d_conv,
        "activation": config.hidden_act,
        "norm_eps": config.rms_norm_eps,
        "conv_bias": config.mamba_conv_bias,
        "projection_bias": config.mamba_proj_bias,
    }


def _build_layers(
    config: PreTrainedConfig,
    settings: ModelSettings,
    decoder: DecoderConfig,
    state_mixer: Callable[[int], StateMixer],
    names: LayerNames = _MAMBA_NAMES,
) -> list[HybridLayer]:
    layers = []
    kinds = zip(config.layer_types, decoder.layers, strict=True)
    for index, (layer_type, kind) in enumerate(kinds):
        is_attention = layer_type == "full_attention"
        mixer = SelfAttention(index, decoder, settings) if is_attention else state_mixer(index)
        feed_forward = build_mlp(decoder, settings, kind.experts)
        layers.append(HybridLayer(mixer, feed_forward, decoder, settings, names))
    return layers


JAMBA = ModelFamily("jamba", ("JambaForCausalLM", "JambaModel"), build=build_jamba)
BAMBA = ModelFamily("bamba", ("BambaForCausalLM", "BambaModel"), build=build_bamba)
QWEN3_NEXT = ModelFamily(
    "qwen3_next", ("Qwen3NextForCausalLM", "Qwen3NextModel"), build=build_qwen3_next
)
QWEN3_5 = ModelFamily(
    "qwen3_5",
    ("Qwen3_5ForCausalLM", "Qwen3_5TextModel", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
    build=build_qwen3_5,
)
