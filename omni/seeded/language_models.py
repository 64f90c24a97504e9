"""Seeded models that generate text, and text encoders, with all files of real checkpoints.

Outputs depend on the whole input, and vary: with transformers' own initialization some models
would repeat one token for any input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    BartConfig,
    BartForConditionalGeneration,
    CLIPImageProcessorPil,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
    MllamaImageProcessorPil,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from omni.seeded.building import (
    ATTENTION_GAIN,
    NOISE_STD,
    SIZES,
    TIED_EMBEDDING_STD,
    byte_level_tokenizer,
    chat_tokenizer,
    decoder_fields,
    initialise,
    save_checkpoint,
    seeded_model,
    suppress_special_tokens,
    train_byte_level,
    wordpiece_tokenizer,
)
from omni.seeded.checkpoints import SEEDED_WINDOW

_DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_SHARED_EXPERT = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 48,
}
_HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    # With four layers: Mamba, Mamba with experts, attention, Mamba with experts.
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    # With four layers: Mamba-2, attention, Mamba-2, Mamba-2.
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    # With four layers: the last one is attention.
    "qwen3_next": _DELTA_RULE | _SHARED_EXPERT,
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_5_moe_text": _DELTA_RULE | _SHARED_EXPERT,
}
"""Config fields by transformers' model type, for any hidden size divisible by 8."""

EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""The same for mixtures of experts."""

# With steps of about 0.13, as in trained models, and rates of exp of the two bounds, a state
# decays by 1/40 to 2/5 per token.
_STEP = -2.0
_LOG_RATES = -1.5, 1.5

_LAYER_PATTERNS = {
    "ministral": ["sliding_attention", "full_attention"],
    "gemma2": ["sliding_attention", "full_attention"],
    "gemma3_text": ["sliding_attention", "sliding_attention", "full_attention"],
}


def build_causal_lm(
    directory: str | Path,
    architecture: str = "qwen2",
    *,
    seed: int = 0,
    with_head: bool = True,
    with_tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """Write a seeded decoder-only checkpoint, with a byte-level BPE tokenizer and a chat template.

    Args:
        seed: seed of the weights; the same seed gives the same bytes.
        with_head: if false, the model without head (``Qwen2Model``) is written, as for embedding.
        changes: config fields; the tokenizer has at most min(vocab_size, 768) tokens.

    Raises:
        ValueError: transformers knows no causal model of that type.
    """
    num_tokens = min(changes.get("vocab_size", 768), 768)
    tokenizer = chat_tokenizer(num_tokens, adds_bos=architecture != "qwen2")
    fields = decoder_fields(tokenizer, **{"tie_word_embeddings": True} | changes)
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    family = _family_settings(architecture, fields["num_hidden_layers"], head_dim)
    config = AutoConfig.for_model(architecture, **{"head_dim": head_dim} | family | fields)
    model = _seeded(AutoModelForCausalLM if with_head else AutoModel, config, seed)
    if with_head:
        suppress_special_tokens(model, tokenizer)
    return save_checkpoint(directory, model, tokenizer if with_tokenizer else None)


def build_text_encoder(directory: str | Path, architecture: str = "bert", **changes: Any) -> Path:
    """Write a seeded bidirectional text encoder with a WordPiece tokenizer.

    Raises:
        ValueError: transformers knows no such model type.
    """
    fields = {**SIZES, "max_position_embeddings": 512, **changes}
    tokenizer = wordpiece_tokenizer(fields["vocab_size"], fields["max_position_embeddings"])
    fields = {"pad_token_id": tokenizer.pad_token_id} | fields
    model = _seeded(AutoModel, AutoConfig.for_model(architecture, **fields))
    return save_checkpoint(directory, model, tokenizer)


def _family_settings(model_type: str, num_layers: int, head_dim: int) -> dict[str, Any]:
    """Return config fields of a family's small model: several windows fit in a short prompt."""
    if model_type == "mistral":
        return {"sliding_window": None}
    if model_type in _HYBRIDS or model_type in EXPERTS:
        return dict({**_HYBRIDS, **EXPERTS}[model_type])
    pattern = _LAYER_PATTERNS.get(model_type)
    if pattern is None:
        return {}
    settings = {"sliding_window": SEEDED_WINDOW, "layer_types": (pattern * num_layers)[:num_layers]}
    # Gemma scales scores by this instead of the head size.
    return settings | ({"query_pre_attn_scalar": head_dim} if "gemma" in model_type else {})


def _seeded(auto_class: Any, config: PreTrainedConfig, seed: int = 0) -> Any:
    # Recurrences mix in the context anyway; sharper scores would only amplify rounding.
    gain = 1.0 if config.model_type in _HYBRIDS else ATTENTION_GAIN
    embedding_std = TIED_EMBEDDING_STD if config.tie_word_embeddings else 1.0

    def draw(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
        """See :func:`~omni.seeded.building.initialise`."""
        sharpness = gain if "attn" in name else 1.0
        if _initialise_recurrence(name, parameter, generator):
            return
        if parameter.ndim == 1:
            # The mean is 1 in norms that scale by their weight, 0 in those that scale by 1 + it.
            plain = float(parameter.mean())
            centre = plain + sharpness - 1.0 if name.endswith("weight") else 0.0
            parameter.normal_(centre, NOISE_STD, generator=generator)
        elif "embed" in name:
            parameter.normal_(0.0, embedding_std, generator=generator)
        else:
            parameter.normal_(0.0, sharpness * parameter.shape[-1] ** -0.5, generator=generator)

    make = partial(auto_class.from_config, config, dtype=torch.float32)
    return seeded_model(make, torch.Generator().manual_seed(seed), draw)


def _initialise_recurrence(name: str, parameter: nn.Parameter, generator: torch.Generator) -> bool:
    """Initialize a parameter of a recurrence; return False and do nothing for other parameters.

    Decays are spread, so that part of the state still depends on the start of a long prompt:
    tests of caching must detect a lost state.
    """
    if name.endswith("A_log"):
        centre = torch.linspace(*_LOG_RATES, parameter.shape[-1]).expand_as(parameter)
    elif name.endswith(("dt_bias", "dt_proj.bias")):
        centre = torch.full_like(parameter, _STEP)
    elif name.endswith(".D"):
        centre = torch.ones_like(parameter)
    else:
        return False
    parameter.normal_(0.0, NOISE_STD, generator=generator).add_(centre)
    return True


# Flat attention averages its input away: families that need it get sharper scores than by fan-in.
_GAINS: Mapping[str, Mapping[str, float]] = {
    "t5": dict.fromkeys(("q", "k", "v", "o"), 1.5),
    "whisper": dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), 2.0),
    **dict.fromkeys(
        ("llava", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        dict.fromkeys(("q_proj", "k_proj", "qkv"), ATTENTION_GAIN),
    ),
}
_TWO_STACKS: dict[str, Any] = {"d_model": 64} | {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 128}.items()
}
"""Sizes of encoder and decoder, by the field names of BART and Whisper."""
_NAMED = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

_WINDOW_S = 2
_FRAMES_PER_SECOND = 100
# In the order of their token ids.
_LANGUAGES = ("en", "zh", "de")
_TASKS = ("translate", "transcribe")
_START = "startoftranscript"
_OTHER_CONTROL = ("startoflm", "startofprev", "nospeech", "notimestamps")
# Seconds between two of Whisper's timestamps.
_TIMESTAMP_STEP = 0.02


def build_bart(directory: str | Path, *, with_tokenizer: bool = True, **changes: Any) -> Path:
    """Write a seeded BART with BART's special ids: 0 begins, 1 pads, 2 ends and starts decoding."""
    fields = _TWO_STACKS | {
        "vocab_size": 768,
        "max_position_embeddings": 256,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }
    config = BartConfig(**(fields | changes))
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = byte_level_tokenizer(
        min(config.vocab_size, 768), specials, "<s> $A </s>", bos_token="<s>", **_NAMED
    )
    model = _sharpened(BartForConditionalGeneration, config)
    with torch.no_grad():
        model.final_logits_bias.normal_(0.0, NOISE_STD, generator=torch.Generator().manual_seed(0))
    suppress_special_tokens(model, tokenizer)
    return save_checkpoint(directory, model, tokenizer if with_tokenizer else None)


def build_t5(directory: str | Path, *, gated: bool = False, **config_overrides: Any) -> Path:
    """Write a seeded T5 with T5's special ids: 0 pads and starts the decoder, 1 ends a text."""
    tokenizer = byte_level_tokenizer(768, ["<pad>", "</s>", "<unk>"], "$A </s>", **_NAMED)
    settings: dict[str, Any] = {
        "vocab_size": 768,
        "d_model": 64,
        # Wider in total than the residual stream, as in some published models.
        "d_kv": 24,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_max_distance": 32,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": not gated,
        "decoder_start_token_id": 0,
    }
    model = _sharpened(T5ForConditionalGeneration, T5Config(**(settings | config_overrides)))
    suppress_special_tokens(model, tokenizer)
    return save_checkpoint(directory, model, tokenizer)


def build_whisper(directory: str | Path, **config_overrides: Any) -> Path:
    """Write a seeded multilingual Whisper with its feature extractor.

    The generation config contains the parts of the decoder's prompt: ids of the languages, of the
    tasks, and of the token that disables timestamps.
    """
    tokenizer = _whisper_tokenizer()
    end, start = _id(tokenizer, "<|endoftext|>"), _id(tokenizer, f"<|{_START}|>")
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=_WINDOW_S)
    settings = _TWO_STACKS | {
        "vocab_size": len(tokenizer),
        "num_mel_bins": extractor.feature_size,
        "max_source_positions": _WINDOW_S * _FRAMES_PER_SECOND // 2,
        "max_target_positions": 128,
        "decoder_start_token_id": start,
        "pad_token_id": end,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    config = WhisperConfig(**(settings | config_overrides))
    model = _sharpened(WhisperForConditionalGeneration, config)
    model.generation_config = _whisper_generation(tokenizer, config)
    suppress_special_tokens(model, tokenizer)
    return save_checkpoint(directory, model, tokenizer, extractor)


def build_mllama(directory: str | Path, **text_overrides: Any) -> Path:
    """Write a seeded Mllama with its image processor; layers 1 and 3 attend to images."""
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    tokenizer = byte_level_tokenizer(760, [*named.values()], "<|bos|> $A", **named)
    text = decoder_fields(tokenizer) | {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 4,
        "max_position_embeddings": 512,
        "cross_attention_layers": [1, 3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    # As in published models, the image token has an embedding but no logit.
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 56,
        "patch_size": 14,
        "max_num_tiles": 4,
        "intermediate_layers_indices": [0, 1],
        "vision_output_dim": 3 * 32,
    }
    config = MllamaConfig(
        vision_config=vision,
        text_config=text | text_overrides,
        image_token_index=_id(tokenizer, "<|image|>"),
    )
    model = _sharpened(MllamaForConditionalGeneration, config)
    processor = MllamaImageProcessorPil(size={"height": 56, "width": 56}, max_image_tiles=4)
    return save_checkpoint(directory, model, tokenizer, processor)


def _whisper_tokenizer() -> WhisperTokenizer:
    """Build a tokenizer: text, then control tokens, timestamps last, as in published models."""
    trained = json.loads(train_byte_level(600, ["<|endoftext|>"]).to_str())["model"]
    merges = [tuple(pair) for pair in trained["merges"]]
    tokenizer = WhisperTokenizer(vocab=trained["vocab"], merges=merges)
    control = [_START, *_LANGUAGES, *_TASKS, *_OTHER_CONTROL]
    tokenizer.add_tokens(
        [AddedToken(f"<|{name}|>", special=True, normalized=False) for name in control]
    )
    steps = range(round(_WINDOW_S / _TIMESTAMP_STEP) + 1)
    tokenizer.add_tokens(
        [AddedToken(f"<|{step * _TIMESTAMP_STEP:.2f}|>", normalized=False) for step in steps]
    )
    return tokenizer


def _whisper_generation(tokenizer: WhisperTokenizer, config: WhisperConfig) -> GenerationConfig:
    """Build the generation config of published multilingual models."""
    # The decoder's prompt may contain these; its output may not.
    control = [_START, *_TASKS, *_OTHER_CONTROL]
    last, num_heads = config.decoder_layers - 1, config.decoder_attention_heads
    aligned = [[layer, head] for layer, head in ((0, 1), (last, 0), (last, 3)) if head < num_heads]
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        max_length=config.max_target_positions,
        is_multilingual=True,
        lang_to_id={f"<|{name}|>": _id(tokenizer, f"<|{name}|>") for name in _LANGUAGES},
        task_to_id={name: _id(tokenizer, f"<|{name}|>") for name in _TASKS},
        no_timestamps_token_id=_id(tokenizer, "<|notimestamps|>"),
        prev_sot_token_id=_id(tokenizer, "<|startofprev|>"),
        return_timestamps=False,
        max_initial_timestamp_index=50,
        alignment_heads=aligned,
        suppress_tokens=sorted(_id(tokenizer, f"<|{name}|>") for name in control),
        begin_suppress_tokens=[_id(tokenizer, "\u0120"), _id(tokenizer, "<|endoftext|>")],
    )


def _id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    return tokenizer.get_vocab()[token]


QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    # Smaller than images, in the first of two layers.
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
"""The vision tower of seeded Qwen2.5 models; its ``out_hidden_size`` is the decoder's width."""

DEEP_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
"""The vision tower of seeded Qwen3 models."""

_NUM_LAYERS = 3
"""Number of layers of the decoders of media."""

HEARING: dict[str, Any] = {
    "num_mel_bins": 32,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "output_dim": SIZES["hidden_size"],
}
"""Sizes of an audio tower."""

# Messages whose content is text, or a list of texts and media.
_TEMPLATE = (
    "{%% for message in messages %%}"
    "{{ '<|' + message['role'] + '|>\n' }}"
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}"
    "{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'text' %%}{{ part['text'] }}%s{%% endif %%}"
    "{%% endfor %%}{%% endif %%}"
    "{{ eos_token + '\n' }}"
    "{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<|assistant|>\n' }}{%% endif %%}"
)


def build_llava(
    directory: str | Path,
    *,
    strategy: Literal["default", "full"] = "default",
    **text_overrides: Any,
) -> Path:
    """Write a seeded LLaVA over Llama with its processors: 16 placeholders for every image."""
    tokenizer = _tokenizer(["<image>"], {"image": "<image>\\n"}, adds_bos=True)
    size, patch = 56, 14
    vision: dict[str, Any] = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": size,
        "patch_size": patch,
    }
    config = LlavaConfig(
        vision_config=vision,
        text_config={"model_type": "llama"} | _text_fields(tokenizer) | text_overrides,
        image_token_index=_id(tokenizer, "<image>"),
        image_seq_length=(size // patch) ** 2,
        vision_feature_layer=-2,
        vision_feature_select_strategy=strategy,
    )
    square = {"height": size, "width": size}
    images = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=square)
    path = _save(directory, LlavaForConditionalGeneration, config, tokenizer, images)
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
        "patch_size": patch,
        "vision_feature_select_strategy": strategy,
    }
    (path / "processor_config.json").write_text(json.dumps(processor, indent=2))
    return path


def build_gemma3_vision(directory: str | Path, *, rows: int = 16, **text_overrides: Any) -> Path:
    """Write a seeded vision Gemma-3 with its processors: ``rows`` rows for every image."""
    names = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
    tokenizer = _tokenizer(names, {"image": names[0]}, adds_bos=True)
    begin, image, end = (_id(tokenizer, name) for name in names)
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False}
    vision |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 56, "patch_size": 7}
    text = {"model_type": "gemma3_text", "head_dim": 16} | _text_fields(tokenizer)
    text |= _family_settings("gemma3_text", _NUM_LAYERS, 16)
    config = Gemma3Config(
        vision_config=vision,
        text_config=text | text_overrides,
        mm_tokens_per_image=rows,
        boi_token_index=begin,
        image_token_index=image,
        eoi_token_index=end,
    )
    images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    path = _save(directory, Gemma3ForConditionalGeneration, config, tokenizer, images)
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": rows}
    (path / "processor_config.json").write_text(json.dumps(processor, indent=2))
    return path


def build_qwen3_asr(directory: str | Path, *, tied: bool = False, **text_overrides: Any) -> Path:
    """Write a seeded Qwen3-ASR with its feature extractor: 13 rows per second of audio."""
    names = ["<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"]
    tokenizer = _tokenizer(names, {"audio": "".join(names)}, adds_bos=False)
    tokenizer.add_tokens(["<asr_text>"])
    extractor = Qwen3ASRFeatureExtractor(feature_size=HEARING["num_mel_bins"])
    text = {"model_type": "qwen3", "head_dim": 16} | _text_fields(tokenizer)
    config = AutoConfig.for_model(
        "qwen3_asr",
        audio_config=HEARING | {"downsample_hidden_size": 16, "n_window_infer": 200},
        text_config=text | {"vocab_size": len(tokenizer)} | text_overrides,
        audio_token_id=_id(tokenizer, names[1]),
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=tied,
    )
    return _save(directory, AutoModelForMultimodalLM.from_config, config, tokenizer, extractor)


def build_voxtral(directory: str | Path, **text_overrides: Any) -> Path:
    """Write a seeded Voxtral with its feature extractor: 25 rows per two seconds of audio."""
    names = ["[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]", "[INST]", "[/INST]"]
    names += ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
    tokenizer = _tokenizer(names, {}, adds_bos=True)
    tokenizer.chat_template = None  # as published
    extractor = WhisperFeatureExtractor(feature_size=32, chunk_length=2)
    hearing = {"num_mel_bins": 32, "hidden_size": 32, "intermediate_size": 128}
    hearing |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_source_positions": 100}
    text = {"model_type": "llama", "head_dim": 16} | _text_fields(tokenizer)
    config = AutoConfig.for_model(
        "voxtral",
        audio_config=hearing,
        text_config=text | {"vocab_size": len(tokenizer)} | text_overrides,
        audio_token_id=_id(tokenizer, names[0]),
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    return _save(directory, AutoModelForMultimodalLM.from_config, config, tokenizer, extractor)


def build_qwen2_5_vl(directory: str | Path, *, tied: bool = False, **text_overrides: Any) -> Path:
    """Write a seeded Qwen2.5-VL with its processors: 1 to 16 rows for an image or two frames."""
    # As published: a grid of two frames, at two frames per second, advances positions by two.
    vision = QWEN_VISION | {"tokens_per_second": 2}
    text = {"rope_parameters": rope([2, 3, 3])} | text_overrides
    return _save_qwen(directory, "qwen2_5_vl", vision, text, tied)


def build_qwen3_vl(directory: str | Path, *, experts: bool = False, **text_overrides: Any) -> Path:
    """Write a seeded Qwen3-VL, with experts or without: 1 to 16 rows for an image or a video."""
    text = {"rope_parameters": rope([4, 2, 2]), "head_dim": 16} | text_overrides
    if experts:
        text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    model_type = "qwen3_vl_moe" if experts else "qwen3_vl"
    return _save_qwen(directory, model_type, DEEP_VISION, text, tied=False)


def build_qwen3_5(directory: str | Path, *, experts: bool = False, tied: bool = False) -> Path:
    """Write a seeded Qwen3.5 with vision, with experts or without."""
    # The last of four layers is attention; RoPE rotates half of the channels of its heads.
    turned = rope([4, 2, 2]) | {"partial_rotary_factor": 0.5}
    text = _DELTA_RULE | {"num_hidden_layers": 4, "rope_parameters": turned, "head_dim": 32}
    vision = {name: value for name, value in DEEP_VISION.items() if "deepstack" not in name}
    model_type, more = ("qwen3_5_moe", _SHARED_EXPERT) if experts else ("qwen3_5", {})
    return _save_qwen(directory, model_type, vision, text | more, tied)


def rope(sections: list[int]) -> dict[str, Any]:
    """Return RoPE parameters for three-dimensional positions."""
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}


def _save_qwen(
    directory: str | Path,
    model_type: str,
    vision: dict[str, Any],
    text: dict[str, Any],
    tied: bool,
) -> Path:
    """Write a vision-language decoder and its processors."""
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    start, end, image, video = names
    in_chat = {"image": f"{start}{image}{end}", "video": f"{start}{video}{end}"}
    tokenizer = _tokenizer(names, in_chat, adds_bos=False)
    whole = _text_fields(tokenizer)
    config = AutoConfig.for_model(
        model_type,
        vision_config=vision | {"out_hidden_size": whole["hidden_size"]},
        text_config=whole | text,
        tie_word_embeddings=tied,
        image_token_id=_id(tokenizer, image),
        video_token_id=_id(tokenizer, video),
        vision_start_token_id=_id(tokenizer, start),
        vision_end_token_id=_id(tokenizer, end),
    )
    processor = Qwen2VLImageProcessorPil(patch_size=14, min_pixels=28 * 28, max_pixels=16 * 28 * 28)
    path = _save(directory, AutoModelForMultimodalLM.from_config, config, tokenizer, processor)
    video_processor = {"fps": 2.0, "min_frames": 4, "max_frames": 768, "size": dict(processor.size)}
    (path / "video_preprocessor_config.json").write_text(json.dumps(video_processor, indent=2))
    return path


def _text_fields(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return decoder_fields(tokenizer, num_hidden_layers=_NUM_LAYERS)


def _tokenizer(
    added: list[str], in_chat: Mapping[str, str], *, adds_bos: bool
) -> PreTrainedTokenizerFast:
    """Build a chat tokenizer with additional tokens, and a template for media."""
    tokenizer = chat_tokenizer(768 - len(added), adds_bos=adds_bos)
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    parts = "".join(
        f"{{% elif part['type'] == '{kind}' %}}{{{{ '{text}' }}}}" for kind, text in in_chat.items()
    )
    tokenizer.chat_template = _TEMPLATE % parts
    return tokenizer


def _save(
    directory: str | Path,
    make: Callable[[Any], Any],
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerFast,
    *processors: Any,
) -> Path:
    model = _sharpened(make, config)
    suppress_special_tokens(model, tokenizer)
    return save_checkpoint(directory, model, tokenizer, *processors)


def _sharpened(make: Callable[[Any], Any], config: PreTrainedConfig) -> Any:
    has_text = config.model_type == "mllama"
    tied = bool((config.text_config if has_text else config).tie_word_embeddings)
    gains = _GAINS.get(config.model_type, {})

    def draw(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
        if not _initialise_recurrence(name, parameter, generator):
            initialise(name, parameter, generator, tied=tied, gains=gains)

    return seeded_model(lambda: make(config), torch.Generator().manual_seed(0), draw)
