"""BART and T5: encoder-decoders that read text.

BART has learned positions and a norm after every part. T5, with or without a gated MLP, has
relative positions, RMS norms, no biases and no factor on the scores.

Sources: Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training for Natural Language
Generation, Translation, and Comprehension", 2019; Raffel et al., "Exploring the Limits of Transfer
Learning with a Unified Text-to-Text Transformer", 2020; the gated MLP is that of version 1.1 and
Flan-T5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, T5Config
from transformers.models.bart.modeling_bart import BartEncoder
from transformers.models.t5.modeling_t5 import T5Stack

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.encoder_decoder_inputs import DecoderPromptRule, EncoderDecoderPromptProcessor
from engine.interface.prompts import EncoderPrompt
from engine.models.base import ModelSettings
from engine.models.encoder_module import TextEncoder
from engine.models.seq2seq.seq2seq import FAIRSEQ_NAMES, Seq2SeqConfig, Seq2SeqModel, Seq2SeqNames

_BART_NAMES = replace(
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
# Unused rows before position 0 in the position table, a remnant of fairseq.
_POSITION_OFFSET = 2


def bart_config(config: PreTrainedConfig) -> Seq2SeqConfig:
    """Read the decoder's part of a config."""
    return Seq2SeqConfig.of_fairseq(
        config,
        config.max_position_embeddings,
        config.max_position_embeddings,
        norm_first=False,
        projection_biases=_BART_NAMES.projections,
        embedding_scale=config.d_model**0.5 if config.scale_embedding else 1.0,
        position_offset=_POSITION_OFFSET,
        names=_BART_NAMES,
    )


def build_bart(checkpoint: Checkpoint, settings: ModelSettings) -> Seq2SeqModel:
    """Build a BART, its weights not yet loaded; see :class:`Seq2SeqModel`."""
    return _build(bart_config(checkpoint.config), BartEncoder, checkpoint, settings)


def _build(
    decoder: Seq2SeqConfig,
    make_encoder: Callable[[Any], PreTrainedModel],
    checkpoint: Checkpoint,
    settings: ModelSettings,
) -> Seq2SeqModel:
    encoder = (make_encoder, checkpoint.config, settings, decoder.max_encoder_len)
    return Seq2SeqModel(decoder, partial(TextEncoder, *encoder), settings, checkpoint.weight_files)


_T5_NAMES = Seq2SeqNames(
    embeddings=("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    head="lm_head.weight",
    encoder="encoder.",
    decoder="decoder.",
    layers="block.",
    self_attention=("layer.0.SelfAttention.", "layer.0.layer_norm."),
    cross_attention=("layer.1.EncDecAttention.", "layer.1.layer_norm."),
    mlp=("layer.2.DenseReluDense.", "layer.2.layer_norm."),
    projections=("q", "k", "v", "o"),
    mlp_projections=("wi", "wo"),
    final_norm="final_layer_norm",
    # The first checkpoints also have a bias for cross-attention, which was never used.
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)
_GATED = ("wi_0", "wi_1", "wo")
# Length that all published models were trained on. Relative positions themselves have no limit.
TRAINED_LENGTH = 512


def trained_length(config: PreTrainedConfig) -> int:
    """Return the longest sequence that a model was trained on, according to its config."""
    return getattr(config, "n_positions", None) or TRAINED_LENGTH


def t5_config(config: PreTrainedConfig) -> Seq2SeqConfig:
    """Read the decoder's part of a config."""
    names = replace(_T5_NAMES, mlp_projections=_GATED) if config.is_gated_act else _T5_NAMES
    max_len = trained_length(config)
    return Seq2SeqConfig(
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_layers=config.num_decoder_layers,
        num_heads=config.num_heads,
        head_dim=config.d_kv,
        vocab_size=config.vocab_size,
        max_position_embeddings=max_len,
        max_encoder_len=max_len,
        activation=config.dense_act_fn,
        norm_eps=config.layer_norm_epsilon,
        rms_norm=True,
        norm_first=True,
        projection_biases=(),
        mlp_bias=False,
        attention_scale=1.0,
        relative_buckets=config.relative_attention_num_buckets,
        max_distance=config.relative_attention_max_distance,
        # With a tied head, logits would have the embedding's scale.
        hidden_scale=config.d_model**-0.5 if config.scale_decoder_outputs else 1.0,
        names=names,
    )


def build_t5(checkpoint: Checkpoint, settings: ModelSettings) -> Seq2SeqModel:
    """Build a T5, its weights not yet loaded; see :class:`Seq2SeqModel`."""
    if settings.dtype == torch.float16:
        raise ValueError("T5 overflows in float16; use bfloat16 or float32")
    return _build(t5_config(checkpoint.config), _encoder_stack, checkpoint, settings)


class T5PromptRule(DecoderPromptRule):
    """Decoder prompts of T5, which start with the padding token and have no BOS."""

    _names_of_start = ("decoder_start_token_id", "pad_token_id")

    def _default(self, encoder: EncoderPrompt | None) -> list[int]:
        return [self.start_token_id]


def _encoder_stack(config: T5Config) -> T5Stack:
    """Create an encoder from the class of both stacks, which the config distinguishes."""
    config.is_decoder = False
    config.use_cache = False
    return T5Stack(config)


T5_PROMPTS = partial(EncoderDecoderPromptProcessor, decoder_rule=T5PromptRule)
