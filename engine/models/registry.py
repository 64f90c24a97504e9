"""From a checkpoint's architecture name to a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from transformers import PreTrainedConfig

from engine.checkpoints.checkpoint import Checkpoint
from engine.layers import LayerOps, can_pack
from engine.models.base import CausalModel
from engine.models.decoders.decoder import build_decoder
from engine.models.decoders.gemma2 import gemma2_config
from engine.models.decoders.gemma3 import gemma3_config
from engine.models.decoders.llama import llama_config
from engine.models.decoders.ministral import ministral_config
from engine.models.decoders.mistral import mistral_config
from engine.models.decoders.qwen2 import qwen2_config
from engine.models.decoders.qwen3 import qwen3_config
from engine.models.encoder_decoder import EncoderDecoderModel
from engine.models.hybrids.bamba import build_bamba
from engine.models.hybrids.jamba import build_jamba
from engine.models.llava.llava import build_llava
from engine.models.mllama.mllama import build_mllama
from engine.models.model_settings import ModelSettings
from engine.models.multimodal import MultiModalModel
from engine.models.qwen2_5_omni.talker import build_qwen2_5_omni_talker
from engine.models.qwen2_5_omni.thinker import build_qwen2_5_omni_thinker
from engine.models.qwen2_5_vl.qwen2_5_vl import build_qwen2_5_vl
from engine.models.seq2seq.bart import bart_config, build_bart
from engine.models.seq2seq.seq2seq_config import Seq2SeqConfig
from engine.models.seq2seq.t5 import build_t5, t5_config
from engine.models.whisper.whisper import build_whisper, whisper_config

__all__ = ["SUPPORTED_ARCHITECTURES", "load_model", "max_positions"]

Builder = Callable[[PreTrainedConfig, ModelSettings, bool], CausalModel]
"""From a config, settings, and whether there is a head to a model without its weights yet."""

_WITH_HEAD = "ForCausalLM"
_BUILDERS: dict[tuple[str, ...], Builder] = {
    ("LlamaForCausalLM", "LlamaModel"): partial(build_decoder, llama_config),
    ("MistralForCausalLM", "MistralModel"): partial(build_decoder, mistral_config),
    ("MinistralForCausalLM", "MinistralModel"): partial(build_decoder, ministral_config),
    ("Qwen2ForCausalLM", "Qwen2Model"): partial(build_decoder, qwen2_config),
    ("Qwen3ForCausalLM", "Qwen3Model"): partial(build_decoder, qwen3_config),
    ("Gemma2ForCausalLM", "Gemma2Model"): partial(build_decoder, gemma2_config),
    # The text model alone: Gemma3Model is the one that sees images.
    ("Gemma3ForCausalLM", "Gemma3TextModel"): partial(build_decoder, gemma3_config),
    ("JambaForCausalLM", "JambaModel"): build_jamba,
    ("BambaForCausalLM", "BambaModel"): build_bamba,
    ("Qwen2_5OmniTalkerForConditionalGeneration",): build_qwen2_5_omni_talker,
}
_BUILDER_OF = {name: builder for names, builder in _BUILDERS.items() for name in names}

EncoderDecoderBuilder = Callable[
    [PreTrainedConfig, ModelSettings, Collection[str]], EncoderDecoderModel
]
"""The same of an encoder-decoder, from the names of the stored weights in place of the head."""

_ENCODER_DECODERS: dict[str, EncoderDecoderBuilder] = {
    "BartForConditionalGeneration": build_bart,
    "T5ForConditionalGeneration": build_t5,
    "WhisperForConditionalGeneration": build_whisper,
    "MllamaForConditionalGeneration": build_mllama,
}
# Their configs have no max_position_embeddings, or mean the encoder's by it.
_SEQ2SEQ_CONFIGS: dict[str, Callable[[PreTrainedConfig], Seq2SeqConfig]] = {
    "BartForConditionalGeneration": bart_config,
    "T5ForConditionalGeneration": t5_config,
    "WhisperForConditionalGeneration": whisper_config,
}

MultiModalBuilder = Callable[[PreTrainedConfig, ModelSettings, Collection[str]], MultiModalModel]
"""The same of a decoder with towers for images and the like; it always has a head."""

_MULTIMODAL: dict[str, MultiModalBuilder] = {
    "LlavaForConditionalGeneration": build_llava,
    "Qwen2_5_VLForConditionalGeneration": build_qwen2_5_vl,
    "Qwen2_5OmniThinkerForConditionalGeneration": build_qwen2_5_omni_thinker,
}

SUPPORTED_ARCHITECTURES = (*_BUILDER_OF, *_ENCODER_DECODERS, *_MULTIMODAL)
"""Architecture names, as ``config.json`` states them, that :func:`load_model` takes."""


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    block_size: int,
    max_model_len: int,
    pack_weights: bool | None = None,
    ops: LayerOps | None = None,
) -> CausalModel:
    """Build a checkpoint's model and load its weights.

    Args:
        checkpoint: where from.
        dtype: of weights, activations and the KV cache.
        device: of the same.
        block_size: tokens per block of the KV cache.
        max_model_len: longest sequence that will run, in tokens.
        pack_weights: whether to hold weights in the CPU library's own layout, which is faster for
            batches and the same up to rounding; by default where that is possible.
        ops: what computes norms, gates and rotations; by default torch.

    Raises:
        ValueError: the architecture, or something that its config asks for, is not supported; or
            the weights do not fit the config.
    """
    device = torch.device(device)
    _check_supported(checkpoint)
    packable = can_pack(device, dtype)
    if pack_weights and not packable:
        raise ValueError(f"weights are packed for float32 on a CPU only, not {dtype} on {device}")
    settings = ModelSettings(dtype, device, block_size, max_model_len, ops or LayerOps())
    if checkpoint.architecture in _ENCODER_DECODERS:
        model: CausalModel = _load_encoder_decoder(checkpoint, settings)
    elif checkpoint.architecture in _MULTIMODAL:
        model = _load_multimodal(checkpoint, settings)
    else:
        model = _load_decoder(checkpoint, settings)
    model.finish_loading(pack_weights=packable if pack_weights is None else pack_weights)
    return model.eval()


def max_positions(checkpoint: Checkpoint) -> int:
    """Tokens of the longest sequence that a checkpoint's decoder allows.

    Raises:
        ValueError: the architecture is not supported.
    """
    _check_supported(checkpoint)
    read_config = _SEQ2SEQ_CONFIGS.get(checkpoint.architecture)
    if read_config is not None:
        return read_config(checkpoint.config).max_position_embeddings
    limit: int = checkpoint.config.get_text_config().max_position_embeddings
    return limit


def _check_supported(checkpoint: Checkpoint) -> None:
    if checkpoint.architecture not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"unsupported architecture {checkpoint.architecture!r} ({checkpoint.path}); "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )


def _load_decoder(checkpoint: Checkpoint, settings: ModelSettings) -> CausalModel:
    architecture, config = checkpoint.architecture, checkpoint.config
    model = _BUILDER_OF[architecture](config, settings, architecture.endswith(_WITH_HEAD))
    # Some embedding models keep the headless names under a causal architecture.
    prefix = "model." if "model.embed_tokens.weight" in checkpoint.weight_files else ""
    tied_head = {"lm_head.weight"} if config.tie_word_embeddings else set()
    checkpoint.load_into(dict(model.targets(prefix)), ignored=tied_head)
    return model


def _load_encoder_decoder(checkpoint: Checkpoint, settings: ModelSettings) -> EncoderDecoderModel:
    builder = _ENCODER_DECODERS[checkpoint.architecture]
    model = builder(checkpoint.config, settings, checkpoint.weight_files)
    checkpoint.load_into(dict(model.targets("")), ignored=model.ignored_weights)
    return model


def _load_multimodal(checkpoint: Checkpoint, settings: ModelSettings) -> MultiModalModel:
    builder = _MULTIMODAL[checkpoint.architecture]
    model = builder(checkpoint.config, settings, checkpoint.weight_files)
    is_tied = checkpoint.config.tie_word_embeddings
    tied_head = {name for name in checkpoint.weight_files if name.endswith("lm_head.weight")}
    checkpoint.load_into(dict(model.targets()), ignored=tied_head if is_tied else set())
    return model
