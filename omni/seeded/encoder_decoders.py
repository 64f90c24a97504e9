"""Seeded encoder-decoder checkpoints: BART, T5, Whisper and Mllama, with the files real ones have.

Their outputs depend on the encoder's input and on the decoder's prompt, and vary: with
transformers' own initialisation they would repeat one token whatever they are given.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AddedToken,
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    MllamaConfig,
    MllamaForConditionalGeneration,
    MllamaImageProcessorPil,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from omni.seeded.building import (
    NOISE_STD,
    DecoderSettings,
    SeededSettings,
    byte_level_tokenizer,
    initialise,
    quieten,
    save_checkpoint,
    seeded_model,
    train_byte_level,
)

# Flat attention averages its input away: sharper than fan-in alone where families need it.
_ATTENTION_GAIN = {"t5": 1.5, "whisper": 2.0}
_NAMED = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_PROJECTIONS = ("q", "k", "v", "o", "q_proj", "k_proj", "v_proj", "out_proj")

_SAMPLING_RATE = 16_000
_FRAMES_PER_SECOND = 100
# In the order in which the tokenizer counts them.
_LANGUAGES = ("en", "zh", "de")
_TASKS = ("translate", "transcribe")
_START = "startoftranscript"
_OTHER_CONTROL = ("startoflm", "startofprev", "nospeech", "notimestamps")
# Seconds between two of Whisper's timestamps.
_TIMESTAMP_STEP = 0.02


def build_bart(directory: str | Path, **settings: Any) -> Path:
    """Write a seeded BART, with BART's special ids: 0 begins a text, 1 pads, 2 ends and starts."""
    size, overrides = SeededSettings.split(settings, max_position_embeddings=256)
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = byte_level_tokenizer(
        min(size.vocab_size, 768), specials, "<s> $A </s>", bos_token="<s>", **_NAMED
    )
    fields = _two_stacks(size) | {
        "vocab_size": size.vocab_size,
        "max_position_embeddings": size.max_position_embeddings,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }
    config = BartConfig(**(fields | overrides))
    model = _seeded(BartForConditionalGeneration, config, size.seed)
    with torch.no_grad():
        model.final_logits_bias.normal_(
            0.0, NOISE_STD, generator=torch.Generator().manual_seed(size.seed)
        )
    quieten(model, tokenizer)
    written = tokenizer if size.with_tokenizer else None
    return save_checkpoint(directory, model, written, size.max_shard_size)


def build_t5(directory: str | Path, *, gated: bool = False, **config_overrides: Any) -> Path:
    """Write a seeded T5, with T5's special ids: 0 pads and starts the decoder, 1 ends."""
    tokenizer = byte_level_tokenizer(768, ["<pad>", "</s>", "<unk>"], "$A </s>", **_NAMED)
    settings: dict[str, Any] = {
        "vocab_size": 768,
        "d_model": 64,
        # Wider than the stream in total, as in some of the published models.
        "d_kv": 24,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_max_distance": 32,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": not gated,
        "decoder_start_token_id": 0,
    }
    model = _seeded(T5ForConditionalGeneration, T5Config(**(settings | config_overrides)))
    quieten(model, tokenizer)
    return save_checkpoint(directory, model, tokenizer)


def build_whisper(
    directory: str | Path, *, window_seconds: int = 2, **config_overrides: Any
) -> Path:
    """Write a seeded multilingual Whisper with its feature extractor.

    The generation config holds what the decoder's prompt is made of: ids of the languages, of the
    tasks, and of the token that forgoes timestamps.
    """
    tokenizer = _whisper_tokenizer(window_seconds)
    end, start = _id(tokenizer, "<|endoftext|>"), _id(tokenizer, f"<|{_START}|>")
    extractor = WhisperFeatureExtractor(
        feature_size=16, chunk_length=window_seconds, sampling_rate=_SAMPLING_RATE
    )
    settings = _two_stacks(SeededSettings()) | {
        "vocab_size": len(tokenizer),
        "num_mel_bins": extractor.feature_size,
        "max_source_positions": window_seconds * _FRAMES_PER_SECOND // 2,
        "max_target_positions": 128,
        "decoder_start_token_id": start,
        "pad_token_id": end,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    config = WhisperConfig(**(settings | config_overrides))
    model = _seeded(WhisperForConditionalGeneration, config)
    model.generation_config = _whisper_generation(tokenizer, config)
    quieten(model, tokenizer)
    path = save_checkpoint(directory, model, tokenizer)
    extractor.save_pretrained(path)
    return path


def build_mllama(directory: str | Path, **text_overrides: Any) -> Path:
    """Write a seeded Mllama with its image processor; the second and the last layer see images."""
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    tokenizer = byte_level_tokenizer(760, [*named.values()], "<|bos|> $A", **named)
    size = DecoderSettings(vocab_size=len(tokenizer), num_layers=4, max_position_embeddings=512)
    text = size.text_config(tokenizer) | {
        "cross_attention_layers": [1, 3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    # As in published models, the image's token has an embedding and no logit.
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
    model = _seeded(MllamaForConditionalGeneration, config)
    path = save_checkpoint(directory, model, tokenizer)
    processor = MllamaImageProcessorPil(size={"height": 56, "width": 56}, max_image_tiles=4)
    processor.save_pretrained(path)
    return path


def _two_stacks(size: SeededSettings) -> dict[str, Any]:
    """The names that BART and Whisper have for the sizes of their encoder and decoder."""
    stacks = {"layers": size.num_layers, "attention_heads": size.num_heads}
    stacks["ffn_dim"] = size.intermediate_size
    both = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in stacks.items()}
    return {"d_model": size.hidden_size} | both


def _whisper_tokenizer(window_seconds: int) -> WhisperTokenizer:
    """Text first, then what controls the decoder, timestamps last; as in published models."""
    trained = json.loads(train_byte_level(600, ["<|endoftext|>"]).to_str())["model"]
    merges = [tuple(pair) for pair in trained["merges"]]
    tokenizer = WhisperTokenizer(vocab=trained["vocab"], merges=merges)
    control = [_START, *_LANGUAGES, *_TASKS, *_OTHER_CONTROL]
    tokenizer.add_tokens(
        [AddedToken(f"<|{name}|>", special=True, normalized=False) for name in control]
    )
    steps = range(round(window_seconds / _TIMESTAMP_STEP) + 1)
    tokenizer.add_tokens(
        [AddedToken(f"<|{step * _TIMESTAMP_STEP:.2f}|>", normalized=False) for step in steps]
    )
    return tokenizer


def _whisper_generation(tokenizer: WhisperTokenizer, config: WhisperConfig) -> GenerationConfig:
    """The generation config of published multilingual models."""
    # The decoder's prompt may hold these; what it writes may not.
    control = [_START, *_TASKS, *_OTHER_CONTROL]
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
        alignment_heads=[[0, 1], [1, 0], [1, 3]],
        suppress_tokens=sorted(_id(tokenizer, f"<|{name}|>") for name in control),
        begin_suppress_tokens=[_id(tokenizer, "\u0120"), _id(tokenizer, "<|endoftext|>")],
    )


def _id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    return tokenizer.get_vocab()[token]


def _seeded(model_class: type[Any], config: PreTrainedConfig, seed: int = 0) -> Any:
    tied = bool(getattr(config, "text_config", config).tie_word_embeddings)
    gains = dict.fromkeys(_PROJECTIONS, _ATTENTION_GAIN.get(config.model_type, 1.0))
    draw = partial(initialise, tied=tied, gains=gains)
    return seeded_model(lambda: model_class(config), torch.Generator().manual_seed(seed), draw)
