"""The decoder over packed tokens shared by the attention-only families.

One layer of attention and gated MLP, run over the tokens of all requests together::

    residual ──norm──► qkv ──► [norm per head] ──► rotate Q and K in place ──► attention ──► o ─┐
        └──────────────────────────────── + ◄──────────────────────────────────────[norm]───────┘
        └──norm──► gate|up ──► act(gate) * up ──► down ──► [norm] ──► + (added by the next layer's
                                                                         norm)

Parts in brackets exist only in some families. The number of operations per layer matters: with 16
tokens in a decode step on a CPU, the time between the products is a large part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from engine.attention.layer import Attention, AttentionStep
from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import Target
from engine.layers import (
    COLUMNS,
    GATED_NAMES,
    MLP,
    ROWS,
    ExpertsConfig,
    HeadNorm,
    LayerNorm,
    Linear,
    MultiAxisRotaryEmbedding,
    RecurrentMixer,
    RMSNorm,
    RotaryEmbedding,
    SparseMoE,
    empty_parameter,
    rope_frequencies,
)
from engine.models.base import CausalModel, ModelSettings
from engine.models.family import ModelFamily, has_head
from prefix_cache import AttentionSpec, FullAttentionSpec, SlidingWindowSpec


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Properties that may differ between layers.

    Attributes:
        window: number of positions that a token sees, including itself; None: all before it.
        rope: index in :attr:`DecoderConfig.ropes` of its rotation; None: heads are not rotated.
        experts: the experts of its MLP; None: a single MLP.
    """

    window: int | None = None
    rope: int | None = 0
    experts: ExpertsConfig | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A Hugging Face config, normalised: every family's defaults are filled in.

    Attributes:
        layers: properties of each layer.
        num_kv_heads: key and value heads; divides ``num_heads``.
        activation: of the MLP, by transformers' name.
        tie_word_embeddings: True if the head is the embedding matrix.
        attention_scale: factor on the scores before the softmax.
        attention_softcap: scores become ``softcap * tanh(score / softcap)``; None: unchanged.
        logit_softcap: the same for the logits.
        embedding_scale: factor on the embeddings of tokens, rounded to their type; None: unscaled.
        norm_offset: added to the checkpoint's norm weights: Gemma scales by ``1 + weight``.
        output_norms: True if the outputs of attention and MLP are also normalised before they are
            added to the residual.
        qkv_bias: True if the Q, K and V projections have biases.
        output_bias: True if the attention's output projection has one.
        mlp_bias: True if the MLP's projections have biases.
        layer_norm: True if norms are :class:`LayerNorm`, False for :class:`RMSNorm`.
        plain_mlp: names of the two projections of an MLP without a gate; None: the MLP is gated.
        qk_norm: True if each head of Q and K is normalised before the rotation.
        attention_gate: True if the Q projection also computes a gate for each head's output.
        ropes: layer types of the config's sets of rope parameters; None if there is only one.
        mlp_name: checkpoint name of a layer's MLP.
        mlp_norm_name: that of the norm before it, without ``output_norms``.
        final_norm_name: that of the norm after the last layer.
    """

    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerKind, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    activation: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    norm_offset: float = 0.0
    output_norms: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    layer_norm: bool = False
    plain_mlp: tuple[str, str] | None = None
    qk_norm: bool = False
    attention_gate: bool = False
    ropes: tuple[str | None, ...] = (None,)
    mlp_name: str = "mlp"
    mlp_norm_name: str = "post_attention_layernorm"
    final_norm_name: str = "norm"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )

    @classmethod
    def from_transformers(cls, config: PreTrainedConfig) -> DecoderConfig:
        """Read the fields that all families name alike; a family replaces the rest."""
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        # If every layer has experts, there may be no intermediate_size.
        has_mlp = hasattr(config, "intermediate_size")
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size if has_mlp else config.moe_intermediate_size,
            layers=(LayerKind(),) * config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            activation=getattr(config, "hidden_activation", None) or config.hidden_act,
            rms_norm_eps=getattr(config, "rms_norm_eps", None) or config.layer_norm_eps,
            # Text configs inside some larger configs omit this field.
            tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            attention_scale=head_dim**-0.5,
        )


def layer_kinds(
    config: PreTrainedConfig, ropes: Sequence[str | None] = (None,)
) -> tuple[LayerKind, ...]:
    """Read ``layer_types`` and ``sliding_window``.

    ``sliding_window`` alone is not sufficient: configs also set it if no layer uses it.

    Args:
        config: of a family whose ``layer_types`` transformers fills in and obeys; without the
            field, all layers have full attention.
        ropes: layer types with separate rope parameters, in the model's order; other types use
            the first.

    Raises:
        ValueError: a layer type is neither full nor sliding attention, or the window is missing.
    """
    kinds = []
    full = ["full_attention"] * config.num_hidden_layers
    for index, layer_type in enumerate(getattr(config, "layer_types", full)):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer {index} of {type(config).__name__} is {layer_type!r}; "
                "supported are 'full_attention' and 'sliding_attention'"
            )
        window = config.sliding_window if layer_type == "sliding_attention" else None
        if layer_type == "sliding_attention" and window is None:
            raise ValueError(
                f"layer {index} of {type(config).__name__} is 'sliding_attention', "
                "but sliding_window is None"
            )
        kinds.append(LayerKind(window, ropes.index(layer_type) if layer_type in ropes else 0))
    return tuple(kinds)


class SelfAttention(nn.Module):
    """Causal self-attention over all tokens or a window, which must not be smaller than a block."""

    def __init__(self, index: int, config: DecoderConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.ops, self.shards = settings.ops, settings.shards
        self.num_heads = self.shards.share(config.num_heads, "num_attention_heads")
        num_kv_heads = self.shards.share(config.num_kv_heads, "num_key_value_heads")
        self.head_dim = config.head_dim
        hidden, options = config.hidden_size, settings.tensor_options
        query_size, kv_size = self.num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.kv_start = query_size + kv_size
        self.has_gate = config.attention_gate
        parts = {"q_proj": query_size * (1 + self.has_gate), "k_proj": kv_size, "v_proj": kv_size}
        split = self.shards, ROWS
        self.qkv = Linear(hidden, parts, bias=config.qkv_bias, split=split, **options)
        parts, split = {"o_proj": hidden}, (self.shards, COLUMNS)
        self.output = Linear(query_size, parts, bias=config.output_bias, split=split, **options)
        self.head_norm: HeadNorm | None = None
        if config.qk_norm:
            sizes = (self.num_heads, num_kv_heads, config.head_dim)
            eps, offset = config.rms_norm_eps, config.norm_offset
            self.head_norm = HeadNorm(*sizes, eps, offset=offset, **options)
        page = (settings.block_size, num_kv_heads, config.head_dim, settings.page_dtype)
        window = config.layers[index].window
        spec: AttentionSpec = FullAttentionSpec(*page)
        # A window that no sequence exceeds is full attention: the layer then shares pages and
        # tables with others, instead of forming a group that never frees a page.
        if window is not None and window < settings.max_model_len:
            spec = SlidingWindowSpec(*page, window)
        scale, softcap = config.attention_scale, config.attention_softcap
        self.attention = Attention(f"layers.{index}.self_attn", spec, scale, softcap)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
        yield from self.qkv.targets(prefix)
        if self.head_norm is not None:
            yield from self.head_norm.targets(prefix)
        yield from self.output.targets(prefix)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, step: AttentionStep
    ) -> Tensor:
        """Map ``(num_tokens, hidden_size)`` to the same shape.

        Args:
            rotation: cosines and sines of the positions; None for models without positions.
        """
        num_tokens = x.shape[0]
        qkv, gate = self.qkv(x), None
        if self.has_gate:
            # Each head of Q is followed by its gate.
            size = 2 * self.num_heads * self.head_dim
            query, gate = qkv[:, :size].view(num_tokens, self.num_heads, -1).chunk(2, dim=-1)
            qkv = torch.cat([query.flatten(1), qkv[:, size:]], dim=1)
        heads = qkv[:, : self.kv_start].view(num_tokens, -1, self.head_dim)
        value = qkv[:, self.kv_start :].view(num_tokens, -1, self.head_dim)
        if self.head_norm is not None:
            heads = self.head_norm(heads)
        if rotation is not None:
            self.ops.rotate(heads, *rotation)
        query, key = heads[:, : self.num_heads], heads[:, self.num_heads :]
        attended = self.attention(query, key, value, step)
        if gate is not None:
            attended = attended * self.ops.each(torch.sigmoid, gate)
        return self.shards.add_up(self.output(attended.reshape(num_tokens, -1)))


def build_norm(config: DecoderConfig, settings: ModelSettings) -> RMSNorm:
    """Build a norm of the residual stream."""
    options, offset = settings.tensor_options, config.norm_offset
    norm_eps, ops = config.rms_norm_eps, settings.ops
    make = LayerNorm if config.layer_norm else RMSNorm
    return make(config.hidden_size, norm_eps, offset=offset, ops=ops, **options)


def build_mlp(
    config: DecoderConfig, settings: ModelSettings, experts: ExpertsConfig | None = None
) -> MLP | SparseMoE:
    """Build the MLP of a layer, which may be a mixture of experts."""
    hidden, options = config.hidden_size, settings.tensor_options
    ops, shards = settings.ops, settings.shards
    if experts is not None:
        return SparseMoE(hidden, experts, config.activation, ops=ops, shards=shards, **options)
    sizes, bias = (hidden, config.intermediate_size, config.activation), config.mlp_bias
    names = config.plain_mlp or GATED_NAMES
    return MLP(*sizes, names=names, bias=bias, ops=ops, shards=shards, **options)


class DecoderLayer(nn.Module):
    """A token mixer and an MLP with their norms; see the module docstring.

    Args:
        mixer: checkpoint name and module of a recurrence that replaces :class:`SelfAttention`.
    """

    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        settings: ModelSettings,
        mixer: tuple[str, RecurrentMixer] | None = None,
    ) -> None:
        super().__init__()
        self.mixer: SelfAttention | RecurrentMixer
        self.mixer_name, self.mixer = mixer or ("self_attn", SelfAttention(index, config, settings))
        experts = config.layers[index].experts
        self.mlp, self.mlp_name = build_mlp(config, settings, experts), config.mlp_name
        self.mlp_norm_name = config.mlp_norm_name
        self.input_norm = build_norm(config, settings)
        self.mlp_norm = build_norm(config, settings)
        self.attention_output_norm: RMSNorm | None = None
        self.mlp_output_norm: RMSNorm | None = None
        if config.output_norms:
            self.attention_output_norm = build_norm(config, settings)
            self.mlp_output_norm = build_norm(config, settings)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
        yield from self.mixer.targets(f"{prefix}{self.mixer_name}.")
        yield from self.mlp.targets(f"{prefix}{self.mlp_name}.")
        for name, norm in self._named_norms():
            yield from norm.targets(f"{prefix}{name}.")

    def _named_norms(self) -> Iterator[tuple[str, RMSNorm]]:
        yield "input_layernorm", self.input_norm
        if self.attention_output_norm is None or self.mlp_output_norm is None:
            # Usually the same name as that of the attention output norm below.
            yield self.mlp_norm_name, self.mlp_norm
            return
        yield "post_attention_layernorm", self.attention_output_norm
        yield "pre_feedforward_layernorm", self.mlp_norm
        yield "post_feedforward_layernorm", self.mlp_output_norm

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        step: AttentionStep,
    ) -> Tensor:
        """Run the layer; ``residual`` is changed in place.

        Args:
            x: output of the previous layer, not yet added to ``residual``; None in the first layer.
            residual: ``(num_tokens, hidden_size)``.
            rotation: cosines and sines of every token's position, by this layer's rope parameters;
                None for a layer without.

        Returns:
            The output of this layer, not yet added to ``residual``.
        """
        normed = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        if isinstance(self.mixer, SelfAttention):
            x = self.mixer(normed, rotation, step)
        else:
            x = self.mixer(normed, step)
        if self.attention_output_norm is not None:
            x = self.attention_output_norm(x)
        output: Tensor = self.mlp(self.mlp_norm.add(x, residual))
        return output if self.mlp_output_norm is None else self.mlp_output_norm(output)


class DecoderModel(CausalModel):
    """A stack of :class:`DecoderLayer` between an embedding and a head.

    Args:
        rotaries: cosines and sines up to the longest sequence that will run, for each of the
            config's ``ropes``.
        has_head: False for a headless checkpoint (an embedding model): ``vocab_size`` is then 0.
        layers: for families with other layers than :class:`DecoderLayer`.
        num_embeddings: rows of the embedding, if there are more of them than logits.
        kept_layer: number of layers after which the residual stream is also emitted, as
            ``layer_states``, before an item's features are added; None: not emitted.

    Raises:
        ValueError: ``kept_layer`` exceeds the number of layers.
    """

    head_name = "lm_head"

    def __init__(
        self,
        config: DecoderConfig,
        rotaries: Sequence[RotaryEmbedding],
        settings: ModelSettings,
        *,
        has_head: bool = True,
        layers: Sequence[nn.Module] | None = None,
        num_embeddings: int | None = None,
        kept_layer: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = settings.ops
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size if has_head else 0
        self.input_vocab_size = num_embeddings or config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        options = settings.tensor_options
        self.dtype = settings.dtype
        shape, dtype = (self.input_vocab_size, config.hidden_size), settings.page_dtype
        self.embedding = empty_parameter(*shape, dtype=dtype, device=settings.device)
        self.embedding_scale: float | None = None
        if config.embedding_scale is not None:
            # Rounded as in transformers: the scale for 3072 channels is 55.5 in bfloat16.
            self.embedding_scale = torch.tensor(config.embedding_scale, dtype=settings.dtype).item()
        self.rotaries = nn.ModuleList(rotaries)
        if layers is None:
            layers = [DecoderLayer(i, config, settings) for i in range(len(config.layers))]
        self.layers = nn.ModuleList(layers)
        mixers = [layer.mixer for layer in layers if isinstance(layer, DecoderLayer)]
        self.attention_layers = [m.attention for m in mixers if isinstance(m, SelfAttention)]
        self.state_layers = [m.state for m in mixers if not isinstance(m, SelfAttention)]
        if kept_layer is not None and not 0 <= kept_layer <= len(layers):
            raise ValueError(
                f"the stream after {kept_layer} layers is asked for; there are {len(layers)}"
            )
        self.kept_layer = kept_layer
        self.final_norm = build_norm(config, settings)
        self.head: Linear | None = None
        if has_head:
            shared = self.embedding if config.tie_word_embeddings else None
            parts = {self.head_name: config.vocab_size}
            self.head = Linear(config.hidden_size, parts, weight=shared, **options)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names and targets; see :meth:`CausalModel.targets`."""
        embedding: Target = self.embedding.data
        tied = self.head if self.config.tie_word_embeddings else None
        if tied is not None and tied.is_quantized and len(self.embedding) == self.vocab_size:
            ((_, embedding),) = tied.targets("")
        yield f"{prefix}embed_tokens.weight", embedding
        for index, layer in enumerate(self.layers):
            yield from layer.targets(f"{prefix}layers.{index}.")  # type: ignore[operator]
        yield from self.final_norm.targets(f"{prefix}{self.config.final_norm_name}.")
        if self.head is not None and not self.config.tie_word_embeddings:
            yield from self.head.targets("")

    def drop_all_but_layers(self) -> None:
        """See :meth:`CausalModel.drop_all_but_layers`."""
        self.embedding, self.head = nn.Parameter(self.embedding.new_empty(0), False), None

    def embed(self, input_ids: Tensor) -> Tensor:
        """Map token ids ``(n,)`` to embeddings ``(n, hidden_size)``."""
        embeds = self.embedding.index_select(0, input_ids).to(self.dtype)
        return embeds if self.embedding_scale is None else embeds.mul_(self.embedding_scale)

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the layers; see the base class. Also emits :meth:`drawn_rows` of codes."""
        rotations = [rotary(positions) for rotary in self.rotaries]
        items = step.item_features
        features = () if items is None else items.split(self.hidden_size, dim=-1)
        # Layers add to the residual in place, and must not change the caller's embeddings.
        residual = inputs_embeds.clone()
        x: Tensor | None = None
        kept = inputs_embeds
        pairs = zip(self.layers, self.config.layers, strict=True)
        for index, (layer, kind) in enumerate(pairs, 1):
            x = layer(x, residual, None if kind.rope is None else rotations[kind.rope], step)
            if index == self.kept_layer:
                kept = residual + x
            if index <= len(features):
                x = x + features[index - 1]
        normed = self.final_norm(residual) if x is None else self.final_norm.add(x, residual)
        tensors = {"hidden_states": normed}
        if self.kept_layer is not None:
            # transformers returns the normed stream instead of the last layer's output.
            is_last = self.kept_layer == len(self.layers)
            tensors["layer_states"] = normed if is_last else kept
        if step.codes is not None:
            tensors |= self.drawn_rows(step.codes)
        return tensors

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states to float32 logits; see :meth:`CausalModel.compute_logits`."""
        if self.head is None:
            raise ValueError("this checkpoint has no language-model head: it cannot make logits")
        logits: Tensor = self.head(hidden_states).float()
        cap = self.config.logit_softcap
        return logits if cap is None else self.ops.each(torch.tanh, logits.div_(cap)).mul_(cap)


def build_rotary(
    config: PreTrainedConfig,
    settings: ModelSettings,
    layer_type: str | None = None,
    make_rotary: Callable[..., RotaryEmbedding] = RotaryEmbedding,
) -> RotaryEmbedding:
    """Build cosines and sines up to the longest sequence; see :func:`rope_frequencies`."""
    inv_freq, scaling = rope_frequencies(config, settings.max_model_len, layer_type)
    return make_rotary(inv_freq, scaling, settings.max_model_len, **settings.tensor_options)


def build_multi_axis_rotary(
    config: PreTrainedConfig,
    settings: ModelSettings,
    *,
    interleaved: bool = False,
    usual: Sequence[int] = (24, 20, 20),
) -> RotaryEmbedding:
    """Build cosines and sines for three position axes.

    Args:
        interleaved: if true, the axes alternate at every frequency.
        usual: number of frequencies per axis if interleaved and not given in the config.

    Raises:
        ValueError: the config does not assign channels to axes.
    """
    sections = (config.rope_parameters or {}).get("mrope_section")
    sections = sections or (usual if interleaved else None)
    if sections is None:
        raise ValueError(f"rope_parameters of {type(config).__name__} has no mrope_section")
    make = partial(MultiAxisRotaryEmbedding, sections=sections, interleaved=interleaved)
    return build_rotary(config, settings, make_rotary=make)


def build_decoder(
    read_config: Callable[[PreTrainedConfig], DecoderConfig],
    config: PreTrainedConfig,
    settings: ModelSettings,
    *,
    has_head: bool = True,
) -> DecoderModel:
    """Build a decoder, its weights not yet loaded; without a head for a headless checkpoint.

    Raises:
        ValueError: something in the config is not supported, or a window is smaller than a block.
    """
    decoder_config = read_config(config)
    rotaries = [build_rotary(config, settings, layer_type) for layer_type in decoder_config.ropes]
    return DecoderModel(decoder_config, rotaries, settings, has_head=has_head)


def decoder_family(
    name: str,
    architectures: tuple[str, ...],
    read_config: Callable[[PreTrainedConfig], DecoderConfig],
    *,
    is_base: bool = True,
    **declared: Any,
) -> ModelFamily:
    """Declare a family of plain decoders.

    Args:
        architectures: with a head (``...ForCausalLM``) and without.
        read_config: normalises the family's config.
        is_base: if true, other families may build on it, with rows in place of embeddings: the
            embeddings of tokens must not be scaled.
        **declared: further fields of :class:`ModelFamily`.
    """

    def build(checkpoint: Checkpoint, settings: ModelSettings) -> DecoderModel:
        config = checkpoint.config
        return build_decoder(read_config, config, settings, has_head=has_head(checkpoint))

    base = read_config if is_base else None
    return ModelFamily(name, architectures, build=build, decoder_config=base, **declared)
