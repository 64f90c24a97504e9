"""BART: learned positions, a norm after every part.

Source: Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training for Natural Language
Generation, Translation, and Comprehension", 2019.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from transformers import PreTrainedConfig
from transformers.models.bart.modeling_bart import BartEncoder

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.encoder_decoder_inputs import EncoderDecoderPromptProcessor
from engine.models.base import ModelSettings
from engine.models.encoder_module import TextEncoder
from engine.models.family import ModelFamily
from engine.models.seq2seq.seq2seq import FAIRSEQ_NAMES, Seq2SeqConfig, Seq2SeqModel

__all__ = ["FAMILY"]

_NAMES = replace(
    FAIRSEQ_NAMES,
    embeddings=(
        "model.shared.weight",
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
    ),
    embedding_norm="layernorm_embedding",
    logits_bias="final_logits_bias",
    ignored=("model.encoder.version", "model.decoder.version"),
)
# The rows of the position table before that of position 0 are a remnant of fairseq.
_POSITION_OFFSET = 2


def bart_config(config: PreTrainedConfig) -> Seq2SeqConfig:
    """The decoder's part of a config."""
    return Seq2SeqConfig.of_fairseq(
        config,
        config.max_position_embeddings,
        config.max_position_embeddings,
        norm_first=False,
        projection_biases=_NAMES.projections,
        embedding_scale=config.d_model**0.5 if config.scale_embedding else 1.0,
        position_offset=_POSITION_OFFSET,
        names=_NAMES,
    )


def build_bart(checkpoint: Checkpoint, settings: ModelSettings) -> Seq2SeqModel:
    """Build a BART, its weights not yet loaded; see :class:`Seq2SeqModel`."""
    config = checkpoint.config
    decoder_config = bart_config(config)
    max_len = decoder_config.max_encoder_len
    build_encoder = partial(TextEncoder, BartEncoder, config, settings, max_len)
    return Seq2SeqModel(decoder_config, build_encoder, settings, checkpoint.weight_files)


FAMILY = ModelFamily(
    "bart",
    ("BartForConditionalGeneration",),
    build=build_bart,
    prompts=EncoderDecoderPromptProcessor,
    max_positions=lambda config: bart_config(config).max_position_embeddings,
)
