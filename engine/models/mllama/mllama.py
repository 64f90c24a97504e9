"""Mllama (Llama 3.2 Vision): layers of Llama, and among them layers that attend to an image alone.

Supported is one image per request, whose place the decoder's prompt marks by the image token, or
none. What a token sees is what transformers lets it see:

- from the image token on, the rows of the image's own tiles;
- before it, all rows, padding tiles included: there the mask hides every row, and transformers
  lifts a mask that hides everything. The MLPs of the image layers leave these tokens alone;
- without an image, nothing: the image layers leave the token as it is.

Sources: Grattafiori et al., "The Llama 3 Herd of Models", 2024; transformers' ``mllama``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor
from transformers import PreTrainedConfig

from engine.inputs.decoder_prompt import DecoderPromptRule
from engine.inputs.encoder_decoder_inputs import EncoderDecoderPromptProcessor
from engine.inputs.encoder_inputs import ImageEncoderInputs
from engine.inputs.prompt_processor import PromptSources
from engine.interface.prompts import DecoderPrompt, EncoderPrompt
from engine.media.image_file import load_image_processor
from engine.models.decoders.decoder import DecoderModel, build_rotary
from engine.models.decoders.decoder_config import DecoderConfig
from engine.models.decoders.decoder_layer import DecoderLayer
from engine.models.encoder_decoder import EncoderDecoderModel
from engine.models.family import ModelFamily
from engine.models.mllama.mllama_encoder import FEATURE_NAMES, ImageEncoder
from engine.models.mllama.mllama_layer import ImageLayer
from engine.models.model_settings import ModelSettings
from engine.requests.encoder_input import EncoderInput, EncoderView

__all__ = ["FAMILY", "MllamaModel", "MllamaPromptRule"]

# Rows of the embedding beyond the logits': the image token's and room for others.
_EXTRA_EMBEDDINGS = 8


class MllamaModel(EncoderDecoderModel, DecoderModel):
    """A Llama with image layers, beside a vision encoder.

    Args:
        config: of the checkpoint, text and vision together.
        settings: types, places and lengths.
    """

    encoder: ImageEncoder
    head_name = "language_model.lm_head"

    def __init__(self, config: PreTrainedConfig, settings: ModelSettings) -> None:
        text = config.text_config
        # The head is a matrix of its own, whatever the config says.
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
        # The text's layers first: their group is the first one.
        layers.sort(key=lambda layer: isinstance(layer, ImageLayer))
        self.attention_layers = [layer.attention for layer in layers]

    def targets(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names, each with its place; see :meth:`CausalModel.targets`."""
        yield from self.encoder.targets(prefix)
        yield from super().targets(f"{prefix}language_model.model.")

    def encoder_view(self, entry: EncoderInput | None, decoder_ids: Sequence[int]) -> EncoderView:
        """See :meth:`EncoderDecoderModel.encoder_view`, and the module's list.

        Raises:
            ValueError: the features are not those of one image, or the prompt does not have
                exactly one image token for it.
        """
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
        return EncoderView(start, entry.num_tokens, self.encoder.num_image_rows(entry))


class MllamaPromptRule(DecoderPromptRule):
    """Decoder prompts as they are: the model began as a text model, and has no start token.

    The image is seen from its token on. Alone, an image has ``<|image|> <BOS>`` for a prompt.
    """

    _names_of_start = ("bos_token_id",)

    def prompt_ids(self, encoder: EncoderPrompt | None, decoder: DecoderPrompt | None) -> list[int]:
        """Ids that the decoder goes on from; see :class:`DecoderPromptRule`."""
        if decoder is None:
            return [self._config.image_token_id, self.start_token_id]
        return self._given(decoder)


def _tiled_image_inputs(sources: PromptSources) -> ImageEncoderInputs:
    path, trust = sources.checkpoint.path, sources.checkpoint.trust_remote_code
    processor = load_image_processor(path, trust_remote_code=trust)
    return ImageEncoderInputs(sources.model, processor, FEATURE_NAMES, sources.media_limits)


FAMILY = ModelFamily(
    "mllama",
    ("MllamaForConditionalGeneration",),
    build=lambda checkpoint, settings: MllamaModel(checkpoint.config, settings),
    prompts=partial(
        EncoderDecoderPromptProcessor,
        encoder_inputs=_tiled_image_inputs,
        decoder_rule=MllamaPromptRule,
        text_is_for_decoder=True,
    ),
)
