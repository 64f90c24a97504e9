"""The decoder that the attention-only families share, written once over packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from engine.attention.layer import AttentionStep
from engine.checkpoints.checkpoint import Checkpoint
from engine.layers import Linear, RotaryEmbedding, rope_frequencies
from engine.models.base import CausalModel, ModelSettings
from engine.models.decoders.decoder_config import DecoderConfig
from engine.models.decoders.decoder_layer import DecoderLayer, build_norm
from engine.models.family import ModelFamily, has_head

__all__ = ["DecoderModel", "build_decoder", "build_rotary", "decoder_family"]


class DecoderModel(CausalModel):
    """A stack of :class:`DecoderLayer` between an embedding and a head.

    Args:
        config: the normalised config.
        rotaries: cosines and sines up to the longest sequence that will run, for each of the
            config's ``ropes``.
        settings: types and places.
        has_head: False for a headless checkpoint (an embedding model): ``vocab_size`` is then 0.
        layers: of families that have others than :class:`DecoderLayer`.
        num_embeddings: rows of the embedding, where there are more of them than logits.
    """

    head_name = "lm_head"
    final_norm_name = "norm"

    def __init__(
        self,
        config: DecoderConfig,
        rotaries: Sequence[RotaryEmbedding],
        settings: ModelSettings,
        *,
        has_head: bool = True,
        layers: Sequence[nn.Module] | None = None,
        num_embeddings: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = settings.ops
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size if has_head else 0
        self.input_vocab_size = num_embeddings or config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        options = settings.tensor_options
        embedding = torch.empty(self.input_vocab_size, config.hidden_size, **options)
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.embedding_scale: float | None = None
        if config.embedding_scale is not None:
            # Rounded as transformers rounds it: the scale of 3072 channels is 55.5 in bfloat16.
            self.embedding_scale = torch.tensor(config.embedding_scale, dtype=settings.dtype).item()
        self.rotaries = nn.ModuleList(rotaries)
        if layers is None:
            own = [DecoderLayer(i, config, settings) for i in range(len(config.layers))]
            layers, self.attention_layers = own, [layer.attention for layer in own]
        self.layers = nn.ModuleList(layers)
        self.final_norm = build_norm(config, settings)
        self.head: Linear | None = None
        if has_head:
            shared = self.embedding if config.tie_word_embeddings else None
            parts = {self.head_name: config.vocab_size}
            self.head = Linear(config.hidden_size, parts, weight=shared, **options)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names, each with its place; see :meth:`CausalModel.targets`."""
        yield f"{prefix}embed_tokens.weight", self.embedding.data
        for index, layer in enumerate(self.layers):
            yield from layer.targets(f"{prefix}layers.{index}.")  # type: ignore[operator]
        yield f"{prefix}{self.final_norm_name}.weight", self.final_norm.weight.data
        if self.head is not None and not self.config.tie_word_embeddings:
            yield from self.head.targets("")

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids ``(n,)`` to embeddings ``(n, hidden_size)``."""
        embeds = self.embedding.index_select(0, input_ids)
        return embeds if self.embedding_scale is None else embeds.mul_(self.embedding_scale)

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the layers; see :meth:`CausalModel.forward`."""
        rotations = [rotary(positions) for rotary in self.rotaries]
        given = [(rotations[kind.rope], step) for kind in self.config.layers]
        return self.run_layers(inputs_embeds, given)

    def run_layers(
        self, inputs_embeds: Tensor, given: Sequence[tuple[Any, ...]]
    ) -> dict[str, Tensor]:
        """Run one layer after the other, and the final norm; see :meth:`CausalModel.forward`.

        Args:
            inputs_embeds: ``(num_tokens, hidden_size)``.
            given: what each layer takes beside what is still to be added and the residual.
        """
        # Layers add to the residual in place; the caller's embeddings are not ours to change.
        residual = inputs_embeds.clone()
        x: Tensor | None = None
        for layer, arguments in zip(self.layers, given, strict=True):
            x = layer(x, residual, *arguments)
        normed = self.final_norm(residual) if x is None else self.final_norm.add(x, residual)
        return {"hidden_states": normed}

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Rows of hidden states to float32 logits; see :meth:`CausalModel.compute_logits`."""
        if self.head is None:
            raise ValueError("this checkpoint has no language-model head: it cannot make logits")
        logits: Tensor = self.head(hidden_states).float()
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def build_rotary(
    config: PreTrainedConfig,
    settings: ModelSettings,
    layer_type: str | None = None,
    make_rotary: Callable[..., RotaryEmbedding] = RotaryEmbedding,
) -> RotaryEmbedding:
    """Cosines and sines up to the longest sequence; see :func:`rope_frequencies`."""
    inv_freq, scaling = rope_frequencies(config, settings.max_model_len, layer_type)
    return make_rotary(inv_freq, scaling, settings.max_model_len, **settings.tensor_options)


def build_decoder(
    read_config: Callable[[PreTrainedConfig], DecoderConfig],
    config: PreTrainedConfig,
    settings: ModelSettings,
    *,
    has_head: bool = True,
    make_rotary: Callable[..., RotaryEmbedding] = RotaryEmbedding,
) -> DecoderModel:
    """Build a decoder, its weights not yet loaded.

    Args:
        read_config: of the family.
        config: a config of that family.
        settings: types, places and lengths.
        has_head: False for a headless checkpoint.
        make_rotary: takes what :class:`RotaryEmbedding` takes.

    Raises:
        ValueError: the config asks for something that is not supported, or a window is smaller
            than a block.
    """
    decoder_config = read_config(config).for_length(settings.max_model_len)
    rotaries = [
        build_rotary(config, settings, layer_type, make_rotary)
        for layer_type in decoder_config.ropes
    ]
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
        name: of the family.
        architectures: with a head (``...ForCausalLM``) and without.
        read_config: all that the family differs in.
        is_base: whether other families may build on it, with rows in the place of embeddings:
            the embeddings of tokens must not be scaled.
        **declared: what else a :class:`ModelFamily` may say.
    """

    def build(checkpoint: Checkpoint, settings: ModelSettings) -> DecoderModel:
        config = checkpoint.config
        return build_decoder(read_config, config, settings, has_head=has_head(checkpoint))

    base = read_config if is_base else None
    return ModelFamily(name, architectures, build=build, decoder_config=base, **declared)
