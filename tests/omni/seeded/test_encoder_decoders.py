"""Seeded encoder-decoders have real ones' files and special ids, and vary with their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
)

from omni.seeded.checkpoints import BART_BENCHMARK

TEXTS = ("The harbour wakes", "Once upon a time there was a fox", "Memory is a cache")
NUM_TOKENS = 16


def answers(model: Any, inputs: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    options: dict[str, Any] = {"do_sample": False, "num_beams": 1, "eos_token_id": None}
    outputs = [model.generate(**given, max_new_tokens=NUM_TOKENS, **options) for given in inputs]
    return [tuple(output[0, -NUM_TOKENS:].tolist()) for output in outputs]


@pytest.mark.parametrize("name", ["bart", "t5", "t5-gated"])
def test_greedy_tokens_vary_and_depend_on_the_encoded_text(seeded: Callable[[str], str], name: str):
    folder = seeded(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    found = answers(model, [tokenizer(text, return_tensors="pt") for text in TEXTS])
    assert len(set(found)) == len(TEXTS)
    assert all(len(set(answer)) >= 4 for answer in found), found


def test_greedy_tokens_vary_and_depend_on_the_audio(seeded: Callable[[str], str]):
    folder = seeded("whisper")
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder)
    time = torch.arange(16_000) / 16_000
    waves = [torch.sin(2 * torch.pi * pitch * time).numpy() for pitch in (220, 440, 3000)]
    features = [extractor(wave, sampling_rate=16_000, return_tensors="pt") for wave in waves]
    found = answers(model, [{**made, "language": "en", "task": "transcribe"} for made in features])
    assert len(set(found)) == len(waves)
    assert all(len(set(answer)) >= 4 for answer in found), found


def test_bart_encloses_texts_as_bart_does(seeded: Callable[[str], str]):
    tokenizer = AutoTokenizer.from_pretrained(seeded("bart"))
    config = AutoConfig.from_pretrained(seeded("bart"))
    first, *_, last = tokenizer("the fox").input_ids
    assert (first, last) == (config.bos_token_id, config.eos_token_id) == (0, 2)
    assert (config.pad_token_id, config.decoder_start_token_id) == (1, 2)
    assert len(tokenizer) <= config.vocab_size


@pytest.mark.parametrize("name", ["t5", "t5-gated"])
def test_t5_ends_texts_as_t5_does(seeded: Callable[[str], str], name: str):
    tokenizer = AutoTokenizer.from_pretrained(seeded(name))
    config = AutoConfig.from_pretrained(seeded(name))
    assert tokenizer("the fox").input_ids[-1] == config.eos_token_id == 1
    assert config.pad_token_id == config.decoder_start_token_id == 0
    assert config.is_gated_act is config.dense_act_fn.startswith("gelu")
    assert config.scale_decoder_outputs is (name == "t5")


def test_whisper_states_the_ids_of_its_control_tokens(seeded: Callable[[str], str]):
    folder = seeded("whisper")
    tokenizer = AutoTokenizer.from_pretrained(folder, language="de", task="translate")
    stated: Any = GenerationConfig.from_pretrained(folder)
    assert tokenizer.prefix_tokens == [
        stated.decoder_start_token_id,
        stated.lang_to_id["<|de|>"],
        stated.task_to_id["translate"],
        stated.no_timestamps_token_id,
    ]
    assert tokenizer.convert_ids_to_tokens(stated.no_timestamps_token_id + 1) == "<|0.00|>"
    config = AutoConfig.from_pretrained(folder)
    assert len(tokenizer) == config.vocab_size


def test_whisper_extractor_fills_the_encoder_window(seeded: Callable[[str], str]):
    extractor = AutoFeatureExtractor.from_pretrained(seeded("whisper"))
    config = AutoConfig.from_pretrained(seeded("whisper"))
    made = extractor([0.0] * 800, sampling_rate=16_000, return_tensors="pt").input_features
    assert made.shape == (1, config.num_mel_bins, 2 * config.max_source_positions)


def test_mllama_image_token_has_an_embedding_and_no_logit(seeded: Callable[[str], str]):
    folder = seeded("mllama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    ids = tokenizer("<|image|>fox").input_ids
    assert ids[:2] == [config.text_config.bos_token_id, config.image_token_index]
    assert config.image_token_index == config.text_config.vocab_size
    processor = AutoImageProcessor.from_pretrained(folder)
    assert processor.max_image_tiles == config.vision_config.max_num_tiles


def test_benchmark_bart_has_about_50_million_parameters():
    config = BartConfig(
        d_model=BART_BENCHMARK["hidden_size"],
        vocab_size=BART_BENCHMARK["vocab_size"],
        max_position_embeddings=BART_BENCHMARK["max_position_embeddings"],
        encoder_layers=BART_BENCHMARK["num_layers"],
        decoder_layers=BART_BENCHMARK["num_layers"],
        encoder_ffn_dim=BART_BENCHMARK["intermediate_size"],
        decoder_ffn_dim=BART_BENCHMARK["intermediate_size"],
    )
    with torch.device("meta"):
        model = BartForConditionalGeneration(config)
    assert 45e6 < model.num_parameters() < 55e6
