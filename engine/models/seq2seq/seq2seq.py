"""The encoder-decoder for text out, whatever its encoder reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.step import AttentionStep
from engine.layers import Linear
from engine.models.encoder_decoder import EncoderDecoderModel
from engine.models.encoder_module import EncoderModule
from engine.models.model_settings import ModelSettings
from engine.models.seq2seq.seq2seq_config import RelativeBias, Seq2SeqConfig
from engine.models.seq2seq.seq2seq_layer import Seq2SeqLayer, build_norm

__all__ = ["RelativeBiasTable", "Seq2SeqModel", "relative_buckets"]


class Seq2SeqModel(EncoderDecoderModel):
    """A stack of :class:`Seq2SeqLayer` between an embedding and a head, beside an encoder.

    Args:
        config: the normalised config.
        build_encoder: makes the encoder; gets the embedding, which it may share.
        settings: types and places.
        stored: names of the checkpoint's weights. They say whether the head is a matrix of its
            own: configs of T5 do not.
    """

    def __init__(
        self,
        config: Seq2SeqConfig,
        build_encoder: Callable[[nn.Parameter], EncoderModule],
        settings: ModelSettings,
        stored: Collection[str],
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = settings.ops
        self.hidden_size = self.encoder_hidden_size = config.hidden_size
        self.vocab_size = self.input_vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        options = settings.tensor_options
        self.embedding = _parameter(config.vocab_size, config.hidden_size, settings)
        self.encoder = build_encoder(self.embedding)
        self.positions: nn.Parameter | None = None
        if config.position_offset is not None:
            rows = config.max_position_embeddings + config.position_offset
            self.positions = _parameter(rows, config.hidden_size, settings)
        names = config.names
        self.embedding_norm = (
            build_norm(config, settings) if names.embedding_norm else nn.Identity()
        )
        layers = [Seq2SeqLayer(i, config, settings) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.attention_layers = [layer.self_attention.attention for layer in layers]
        self.attention_layers += [layer.cross_attention.attention for layer in layers]
        self.final_norm = build_norm(config, settings) if names.final_norm else nn.Identity()
        self.relative_bias: RelativeBiasTable | None = None
        if config.relative_bias is not None:
            self.relative_bias = RelativeBiasTable(config.relative_bias, config.num_heads, settings)
        self._name_embedding_and_head(stored)
        shared = None if self.has_own_head else self.embedding
        parts = {names.head.removesuffix(".weight"): config.vocab_size}
        self.head = Linear(config.hidden_size, parts, weight=shared, **options)
        self.logits_bias: nn.Parameter | None = None
        if names.logits_bias in stored:
            self.logits_bias = _parameter(1, config.vocab_size, settings)

    def _name_embedding_and_head(self, stored: Collection[str]) -> None:
        """Find the shared matrix, which exporters store under any of its names."""
        names = self.config.names
        places = [name for name in names.embeddings if name in stored]
        self.has_own_head = bool(places) and names.head in stored
        self.embedding_name = next(iter(places), names.embeddings[0])
        if not places and names.head in stored:
            self.embedding_name = names.head
        self.ignored_weights = {*names.embeddings, *names.ignored}

    def targets(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names, each with its place; see :meth:`CausalModel.targets`."""
        names = self.config.names
        yield f"{prefix}{self.embedding_name}", self.embedding.data
        yield from self.encoder.targets(f"{prefix}{names.encoder}")
        decoder = f"{prefix}{names.decoder}"
        if self.positions is not None:
            yield f"{decoder}embed_positions.weight", self.positions.data
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Seq2SeqLayer):
                yield from layer.targets(f"{decoder}{names.layers}{index}.")
        for name, norm in (
            (names.embedding_norm, self.embedding_norm),
            (names.final_norm, self.final_norm),
        ):
            for key, tensor in norm.state_dict().items():
                yield f"{decoder}{name}.{key}", tensor
        if self.relative_bias is not None:
            first = f"{decoder}{names.layers}0.{names.self_attention.part}"
            yield f"{first}{self.relative_bias.config.name}", self.relative_bias.weight.data
        if self.has_own_head:
            yield from self.head.targets(prefix)
        if self.logits_bias is not None:
            yield f"{prefix}{names.logits_bias}", self.logits_bias.data

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids ``(n,)`` to embeddings ``(n, hidden_size)``."""
        embeds = F.embedding(input_ids, self.embedding)
        scale = self.config.embedding_scale
        return embeds if scale == 1.0 else embeds.mul_(scale)

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the decoder's layers; see :meth:`CausalModel.forward`."""
        x = inputs_embeds
        if self.positions is not None and self.config.position_offset is not None:
            x = x + F.embedding(positions + self.config.position_offset, self.positions)
        x = self.embedding_norm(x)
        bias = None if self.relative_bias is None else self.relative_bias.by_distance
        for layer in self.layers:
            x = layer(x, step, bias)
        return {"hidden_states": self.final_norm(x)}

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Rows of hidden states to float32 logits; see :meth:`CausalModel.compute_logits`."""
        scale = self.config.hidden_scale
        logits: Tensor = self.head(hidden_states if scale == 1.0 else hidden_states * scale)
        return (logits if self.logits_bias is None else logits + self.logits_bias).float()


class RelativeBiasTable(nn.Module):
    """T5's relative positions: one learned value per head and bucket of distances.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2020.

    Attributes:
        by_distance: ``(num_heads, max_distance + 1)`` float32, the value of every distance from
            a query back to a key; the last column stands for all beyond. Made by
            :meth:`finish_loading`.
    """

    by_distance: Tensor

    def __init__(self, config: RelativeBias, num_heads: int, settings: ModelSettings) -> None:
        super().__init__()
        self.config = config
        self.weight = _parameter(config.num_buckets, num_heads, settings)

    def finish_loading(self) -> None:
        """Spread the loaded values over the distances."""
        buckets = relative_buckets(self.config.num_buckets, self.config.max_distance)
        values = self.weight.data[buckets.to(self.weight.device)]
        self.by_distance = values.T.float().contiguous()


def relative_buckets(num_buckets: int, max_distance: int) -> Tensor:
    """The bucket of every distance of a causal decoder in T5's way, ``(max_distance + 1,)``."""
    num_exact = num_buckets // 2
    distances = torch.arange(max_distance + 1)
    # In float32, and in this order: a distance at a boundary falls where transformers puts it.
    steps = torch.log(distances.float() / num_exact) / math.log(max_distance / num_exact)
    ranges = num_exact + (steps * (num_buckets - num_exact)).long()
    return torch.where(distances < num_exact, distances, ranges.clamp(max=num_buckets - 1))


def _parameter(rows: int, width: int, settings: ModelSettings) -> nn.Parameter:
    values = torch.empty(rows, width, **settings.tensor_options)
    return nn.Parameter(values, requires_grad=False)
