"""Mllama (Llama 3.2 Vision): layers of Llama interleaved with layers that attend only to an image.

At most one image per request is supported; the decoder's prompt marks its position by the image
token. As in transformers, a token sees:

- from the image token on, the rows of the image's own tiles;
- before it, all rows including padding tiles: the mask hides every row there, and transformers
  ignores a mask that hides everything. The MLPs of the image layers skip these tokens;
- without an image, nothing: the image layers leave the token unchanged.

Sources: Grattafiori et al., "The Llama 3 Herd of Models", 2024; transformers' ``mllama``.

A layer of Mllama's decoder that attends to the image instead of the text::

    residual ──norm──► q, norm per head ──► attention to the image ──► o ──► * gate ──┐
        └───────────────────────────────── + ◄────────────────────────────────────────┘
        └──norm──► MLP ──► * gate, 0 for tokens before the image ──► + (the next layer's norm)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.mllama.modeling_mllama import MllamaVisionModel

from engine.attention.layer import Attention, AttentionStep
from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import Target
from engine.inputs.encoder_decoder_inputs import (
    DecoderPromptRule,
    EncoderDecoderPromptProcessor,
    ImageEncoderInputs,
)
from engine.interface.prompts import DecoderPrompt, EncoderPrompt
from engine.layers import MLP, Linear, RMSNorm, empty_parameter
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import DecoderConfig, DecoderLayer, DecoderModel, build_rotary
from engine.models.encoder_module import EncoderDecoderModel, EncoderModule, build_empty
from engine.requests.encoder_input import EncoderInput, EncoderView
from prefix_cache import CrossAttentionSpec


class ImageLayer(nn.Module):
    """Gated cross-attention and gated MLP; see the module docstring."""

    def __init__(self, index: int, config: DecoderConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.head_dim, self.num_kv_heads = config.head_dim, config.num_kv_heads
        hidden, options = config.hidden_size, settings.tensor_options
        query_size, kv_size = config.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.query = Linear(hidden, {"q_proj": query_size}, **options)
        self.key_value = Linear(hidden, {"k_proj": kv_size, "v_proj": kv_size}, **options)
        self.output = Linear(query_size, {"o_proj": hidden}, **options)
        eps, ops = config.rms_norm_eps, settings.ops
        self.query_norm = RMSNorm(self.head_dim, eps, ops=ops, **options)
        self.key_norm = RMSNorm(self.head_dim, eps, ops=ops, **options)
        self.input_norm = RMSNorm(hidden, eps, ops=ops, **options)
        self.mlp_norm = RMSNorm(hidden, eps, ops=ops, **options)
        self.mlp = MLP(hidden, config.intermediate_size, config.activation, ops=ops, **options)
        self.gates = empty_parameter(2, 1, **options)
        spec = CrossAttentionSpec(
            settings.block_size, self.num_kv_heads, self.head_dim, settings.page_dtype
        )
        self.attention = Attention(f"layers.{index}.cross_attn", spec, config.attention_scale)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
        for linear in (self.query, self.key_value, self.output):
            yield from linear.targets(f"{prefix}cross_attn.")
        yield from self.mlp.targets(f"{prefix}mlp.")
        for name, norm in (
            ("cross_attn.q_norm", self.query_norm),
            ("cross_attn.k_norm", self.key_norm),
            ("input_layernorm", self.input_norm),
            ("post_attention_layernorm", self.mlp_norm),
        ):
            yield f"{prefix}{name}.weight", norm.weight.data
        yield f"{prefix}cross_attn_attn_gate", self.gates.data[0]
        yield f"{prefix}cross_attn_mlp_gate", self.gates.data[1]

    def finish_loading(self) -> None:
        """Convert the stored gates to factors; call once."""
        self.gates.data.tanh_()

    def attend(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Attend with normed ``x`` ``(num_tokens, hidden_size)`` and project back to its shape."""
        num_tokens = x.shape[0]
        query = self._normed_heads(self.query(x), self.query_norm)
        key: Tensor | None = None
        value: Tensor | None = None
        if step.encoder_hidden_states is not None:
            key, value = self.key_value(step.encoder_hidden_states).chunk(2, dim=-1)
            key = self._normed_heads(key, self.key_norm)
            value = value.unflatten(-1, (self.num_kv_heads, self.head_dim))
        attended = self.attention(query, key, value, step)
        return self.output(attended.reshape(num_tokens, -1))

    def _normed_heads(self, x: Tensor, norm: RMSNorm) -> Tensor:
        heads: Tensor = norm(x.reshape(-1, self.head_dim))
        return heads.view(x.shape[0], -1, self.head_dim)

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        step: AttentionStep,
    ) -> Tensor:
        """See :meth:`DecoderLayer.forward`; unrotated, because image rows have no positions."""
        normed = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        attended = self.attend(normed, step).mul_(self.gates[0])
        output: Tensor = self.mlp(self.mlp_norm.add(attended, residual)).mul_(self.gates[1])
        if step.follows_encoder is not None:
            output.mul_(step.follows_encoder[:, None])
        return output


FEATURE_NAMES = _PIXELS, _RATIO, _TILES = "pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"
"""Inputs of the encoder, named as by transformers' processor."""


class ImageEncoder(EncoderModule):
    """Encodes an image's tiles to rows, including trailing padding tiles::

        | tile 0: class, patches | tile 1 | ... | padding tile | padding tile |
        └──── seen by tokens from the image on ───────┘

    Tiles and padding tiles attend to each other in the vision tower, and tokens before the image
    see all of them, so none can be left out.
    """

    def __init__(self, config: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__()
        vision = config.vision_config
        self.module = build_empty(MllamaVisionModel, vision, settings)
        projector = {"multi_modal_projector": config.text_config.hidden_size}
        self.projector = Linear(
            vision.vision_output_dim, projector, bias=True, **settings.tensor_options
        )
        # The patches of a tile, and one class row.
        self.rows_per_tile: int = (vision.image_size // vision.patch_size) ** 2 + 1
        self.max_len = vision.max_num_tiles * self.rows_per_tile
        self.num_ratios = len(vision.supported_aspect_ratios)
        self.shapes = {
            _PIXELS: (1, vision.max_num_tiles, vision.num_channels, *[vision.image_size] * 2),
            _RATIO: (1,),
            _TILES: (1, vision.max_num_tiles),
        }

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield the targets of the tower and the projection."""
        yield from super().targets(f"{prefix}vision_model.")
        yield from self.projector.targets(prefix)

    def check_input(self, entry: EncoderInput) -> None:
        """Require the features of one image, as computed by transformers' processor."""
        for name, expected in self.shapes.items():
            shape = tuple(entry.features[name].shape)
            if shape != expected:
                raise ValueError(f"{name} of one image must be {expected}, got {shape}")
        tiles = entry.features[_TILES][0].tolist()
        if tiles != sorted(tiles, reverse=True) or not {1} <= set(tiles) <= {0, 1}:
            raise ValueError(f"{_TILES} must be ones and then zeros, got {tiles}")
        ratio = int(entry.features[_RATIO])
        if not 1 <= ratio <= self.num_ratios:
            raise ValueError(f"{_RATIO} must be 1 to {self.num_ratios}, got {ratio}")

    def forward(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """See :meth:`EncoderModule.forward`."""
        features = {name: self.stacked_feature(inputs, name) for name in self.shapes}
        return self.projector(self.module(**features).last_hidden_state.flatten(0, 3))


# Embedding rows without a logit: that of the image token, and spare ones.
_EXTRA_EMBEDDINGS = 8


class MllamaModel(EncoderDecoderModel, DecoderModel):
    """A Llama with image layers, and a vision encoder; see :data:`Builder`."""

    encoder: ImageEncoder
    head_name = "language_model.lm_head"

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        config: Any = checkpoint.config
        text = config.text_config
        # The head is a separate matrix, regardless of the config.
        decoder_config = replace(DecoderConfig.from_transformers(text), tie_word_embeddings=False)
        image_layers = set(text.cross_attention_layers)
        layers = [
            (ImageLayer if index in image_layers else DecoderLayer)(index, decoder_config, settings)
            for index in range(len(decoder_config.layers))
        ]
        num_embeddings = decoder_config.vocab_size + _EXTRA_EMBEDDINGS
        super().__init__(
            decoder_config,
            [build_rotary(text, settings)],
            settings,
            layers=layers,
            num_embeddings=num_embeddings,
        )
        self.image_token_id = int(config.image_token_index)
        self.encoder_hidden_size = self.hidden_size
        self.encoder = ImageEncoder(config, settings)
        # After those of the text, whose group must be the first one.
        self.attention_layers += [x.attention for x in layers if isinstance(x, ImageLayer)]

    def targets(self, prefix: str = "") -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names and targets; see :meth:`CausalModel.targets`."""
        yield from self.encoder.targets(prefix)
        yield from super().targets(f"{prefix}language_model.model.")

    def encoder_view(self, entry: EncoderInput | None, decoder_ids: Sequence[int]) -> EncoderView:
        """See :meth:`EncoderDecoderModel.encoder_view`, and the list in the module docstring."""
        num_places = list(decoder_ids).count(self.image_token_id)
        if num_places != (entry is not None):
            raise ValueError(
                f"the decoder prompt has {num_places} image tokens (id {self.image_token_id}); "
                f"supported are one image with one token, or no image and no token; "
                f"got {'no' if entry is None else 'one'} image"
            )
        if entry is None:
            return EncoderView(self.max_position_embeddings, 0, 0)
        self.encoder.check_input(entry)
        start = list(decoder_ids).index(self.image_token_id)
        rows = int(entry.features[_TILES].sum()) * self.encoder.rows_per_tile
        return EncoderView(start, entry.num_tokens, rows)


class MllamaPromptRule(DecoderPromptRule):
    """Unchanged decoder prompts: derived from a text model, Mllama has no start token.

    An image without text has the prompt ``<|image|> <BOS>``.
    """

    _names_of_start = ("bos_token_id",)

    def prompt_ids(self, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None) -> list[int]:
        """Return the ids of the decoder's prompt; see :class:`DecoderPromptRule`."""
        if decoder is None:
            return [self._config.image_token_id, self.start_token_id]
        return self._given(decoder)


MLLAMA_PROMPTS = partial(
    EncoderDecoderPromptProcessor,
    encoder_inputs=partial(ImageEncoderInputs, feature_names=FEATURE_NAMES),
    decoder_rule=MllamaPromptRule,
    text_is_for_decoder=True,
)
