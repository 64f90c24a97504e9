"""Seeded checkpoints load in transformers, and their output depends on the input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    GenerationConfig,
)

from omni.seeded.building import wordpiece_tokenizer
from omni.seeded.checkpoints import SEEDED_MODELS, resolve_model
from omni.seeded.language_models import build_causal_lm, build_text_encoder

PROMPTS = ("What is the capital of", "Once upon a time there was a fox", "The library has")
NUM_TOKENS = 24
# These have separate tests.
ENCODER_DECODERS = ("bart", "t5", "t5-gated", "whisper", "mllama")
NO_TEXT = ("pocket_tts_codec",)


def test_every_seeded_name_has_its_builder() -> None:
    assert all(callable(model.builder()) for model in SEEDED_MODELS.values())


@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        "qwen2-untied",
        "qwen2-sliding",
        "qwen3",
        "qwen3_moe",
        "mixtral",
        "llama",
        "mistral",
        "mistral-sliding",
        "ministral",
        "gemma2",
        "gemma3",
        "jamba",
        "bamba",
    ],
)
def test_greedy_tokens_vary_and_depend_on_the_input(seeded: Callable[[str], str], name: str):
    folder = seeded(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    answers = set()
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
        )
        answer = tuple(output[0, -NUM_TOKENS:].tolist())
        assert len(set(answer)) >= 5, f"{prompt!r} is answered by {answer}"
        answers.add(answer)
    assert len(answers) == len(PROMPTS)


@pytest.mark.parametrize(
    "name",
    [name for name in SEEDED_MODELS if name not in ENCODER_DECODERS + NO_TEXT],
)
def test_tokenizer_fits_the_model_and_round_trips(seeded: Callable[[str], str], name: str):
    folder = seeded(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder).get_text_config()
    # Where codes are sampled, text has a separate matrix.
    assert len(tokenizer) <= getattr(config, "text_vocab_size", config.vocab_size)
    if name == "bert":
        assert tokenizer("the fox").input_ids[0] == tokenizer.cls_token_id
        return
    text = "Hello, what is this? é€😀\n  two  spaces"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    if name == "csm":  # its roles are numbers of speakers
        messages = [{"role": "1", "content": [{"type": "text", "text": "hi"}]}]
        written = tokenizer.apply_chat_template(messages, tokenize=False)
        assert written == "<|begin_of_text|>[1]hi<|end_of_text|>"
        return
    if name == "pocket_tts":  # its replies are no text
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi<|audio_bos|>"
        return
    if name == "voxtral":  # its published folder has none
        assert tokenizer.chat_template is None
        return
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    if "omni" in name:  # the family's own markers, and a system prompt of its template's
        assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    else:
        assert chat == "<|user|>\nhi<|eos|>\n<|assistant|>\n"


def test_small_vocabularies_hold_their_tokenizer(tmp_path: Path):
    folder = build_causal_lm(tmp_path, vocab_size=400)
    assert len(AutoTokenizer.from_pretrained(folder)) <= 400


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path: Path):
    weights = [
        (build_causal_lm(tmp_path / str(i), seed=seed) / "model.safetensors").read_bytes()
        for i, seed in enumerate((0, 0, 1))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_building_leaves_the_global_random_state_alone(tmp_path: Path):
    before = torch.random.get_rng_state()
    build_causal_lm(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_wordpiece_vocabulary_is_the_same_each_time():
    first, second = (wordpiece_tokenizer(320, 64).get_vocab() for _ in range(2))
    assert first == second and {"[CLS]", "a", "##a", "the"} <= set(first)


def test_encoder_rows_depend_on_both_sides(tmp_path: Path):
    model = AutoModel.from_pretrained(build_text_encoder(tmp_path))
    ids = torch.tensor([[2, 40, 50, 60, 3]])
    changed = ids.clone()
    changed[0, 3] = 61
    with torch.inference_mode():
        rows, other = (model(input_ids=x).last_hidden_state[0] for x in (ids, changed))
    assert (rows - other).abs().amax(dim=1).min() > 1e-3
    assert model(input_ids=ids).pooler_output.shape == (1, 64)


def test_other_references_are_returned_unchanged(tmp_path: Path):
    for reference in ("Qwen/Qwen2-0.5B", "/models/mine", "seededish"):
        assert resolve_model(reference, tmp_path) == reference
    assert list(tmp_path.iterdir()) == []


def test_unknown_name_lists_the_known(tmp_path: Path):
    with pytest.raises(ValueError, match="unknown seeded model 'seeded:gpt9'") as raised:
        resolve_model("seeded:gpt9", tmp_path)
    assert all(f"seeded:{name}" in str(raised.value) for name in SEEDED_MODELS)


def test_cache_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNI_CACHE_DIR", str(tmp_path))
    assert Path(resolve_model("seeded:bert")).parent == tmp_path / "seeded"


def test_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def build(directory: str | Path) -> Path:
        (Path(directory) / "config.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setitem(SEEDED_MODELS, "qwen2", build)
    with pytest.raises(ValueError, match="disk full; set OMNI_CACHE_DIR"):
        resolve_model("seeded:qwen2", tmp_path)
    assert [path.suffix for path in (tmp_path / "seeded").iterdir()] == [".lock"]


TEXTS = ("The harbour wakes", "Once upon a time there was a fox", "Memory is a cache")
NUM_PAIR_TOKENS = 16


def answers(model: Any, inputs: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    options: dict[str, Any] = {"do_sample": False, "num_beams": 1, "eos_token_id": None}
    outputs = [
        model.generate(**given, max_new_tokens=NUM_PAIR_TOKENS, **options) for given in inputs
    ]
    return [tuple(output[0, -NUM_PAIR_TOKENS:].tolist()) for output in outputs]


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


def test_the_older_name_of_the_module_still_works() -> None:
    from omni.seeded_checkpoints import resolve_model as older

    assert older is resolve_model
