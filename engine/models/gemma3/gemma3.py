"""Gemma-3 with images: a SigLIP tower whose patches are averaged, and Gemma-3's decoder.

Tokens of an image see each other, including later ones, as far back as the layer's window reaches.
An image runs in one step, so that its cached blocks always depend on the whole image. A prefix hit
may end inside it: the rest then runs in one step, and sees the cached part::

    prompt     a  b  \n\n  begin  *  *  *  *  end  \n\n  c         * = one row of the image
    *  sees    x  x    x      x    x  q  x  x

A prompt's text marks an image only by its begin token; the line breaks and the end are inserted.
Source: Gemma Team, "Gemma 3 Technical Report", 2025; transformers' ``gemma3``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3Model

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.multimodal_inputs import MultiModalPromptProcessor
from engine.inputs.prompt_processor import PromptContent, PromptSources
from engine.inputs.prompt_tokens import WrittenPrompt, written
from engine.interface.prompts import Prompt, TextPrompt
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import build_decoder
from engine.models.decoders.families import gemma3_config
from engine.models.llava.llava import LlavaTower
from engine.models.multimodal import MultiModalModel
from engine.requests.encoder_input import Modality, MultiModalInput


class AveragedTower(LlavaTower):
    """Encodes an image of fixed size to one row per square of patches."""

    known_weight = "multi_modal_projector.mm_input_projection_weight"
    tower_type = "siglip_vision_model"
    make = Gemma3Model

    def rows_of(self, config: PreTrainedConfig) -> tuple[int, dict[str, Any]]:
        """See :meth:`LlavaTower.rows_of`; there are no options."""
        return int(config.mm_tokens_per_image), {}


class WholeImagePrompts(MultiModalPromptProcessor):
    """Inserts the tokens around an image, and schedules each image as a whole.

    Raises:
        ValueError: the checkpoint's processor crops images.
    """

    def __init__(self, sources: PromptSources) -> None:
        super().__init__(sources)
        config = sources.checkpoint.config
        self._ids = [config.boi_token_index, config.image_token_index, config.eoi_token_index]
        if getattr(getattr(self._makers["image"], "processor", None), "do_pan_and_scan", False):
            raise ValueError(
                "preprocessor_config.json sets do_pan_and_scan, which cuts images and is not "
                "supported; set it to false"
            )

    def _resolve(self, prompt: Prompt) -> PromptContent:
        if self._tokenizer is not None and isinstance(prompt, WrittenPrompt):
            text, adds_special = written(prompt, self._tokenizer, self._limits)
            begin, *shown = (str(self._tokenizer.convert_ids_to_tokens(n)) for n in self._ids)
            text = text.replace(begin, "".join(("\n\n", begin, *shown, "\n\n")))
            prompt = TextPrompt(text, add_special_tokens=adds_special)
        return super()._resolve(prompt)

    def input_of(
        self,
        modality: Modality,
        features: Mapping[str, Tensor],
        offset: int,
        cache_salt: str | None,
    ) -> MultiModalInput:
        """See :meth:`MultiModalPromptProcessor.input_of`."""
        item = super().input_of(modality, features, offset, cache_salt)
        if item.length > (budget := self._limits.max_num_batched_tokens):
            raise ValueError(
                f"its {item.length} tokens see each other and run in one step, but "
                f"max_num_batched_tokens is {budget}; raise it to {item.length} or more"
            )
        return replace(item, bidirectional=True)


def build_gemma3(checkpoint: Checkpoint, settings: ModelSettings) -> MultiModalModel:
    """Build a Gemma-3 with image input, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    return MultiModalModel(
        # transformers does not cap logits in the multimodal model.
        build_decoder(
            lambda text: replace(gemma3_config(text), logit_softcap=None),
            config.text_config,
            settings,
        ),
        {"image": AveragedTower(config, settings)},
        {"image": int(config.image_token_index)},
        checkpoint.weight_files,
    )
