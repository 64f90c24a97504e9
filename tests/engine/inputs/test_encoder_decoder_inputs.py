"""Encoder-decoder prompts of text, sound and images, and the beginning of decoder prompts."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    SeamlessM4TFeatureExtractor,
    T5Config,
    T5ForConditionalGeneration,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

from engine import (
    AudioPrompt,
    ChatPrompt,
    EmbedsPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.encoder_decoder_inputs import (
    AudioEncoderInputs,
    DecoderPromptRule,
    ImageEncoderInputs,
)
from engine.inputs.input_processor import InputProcessor
from engine.inputs.multimodal_inputs import AudioFeatureMaker
from engine.inputs.prompt_processor import PlainPromptProcessor, PromptSources
from engine.inputs.prompt_tokens import FitCheck, InputLimits
from engine.interface.engine import NewRequest
from engine.media.image_file import load_image_processor
from engine.media.sound_file import load_extractor
from engine.models.registry import FAMILIES
from engine.models.seq2seq.families import T5PromptRule
from engine.models.whisper.whisper import WhisperPromptRule
from engine.requests.encoder_input import EncoderInput, EncoderView
from engine.requests.request import Request
from engine.text.tokenizer import load_tokenizer
from omni.seeded.language_models import build_bart, build_whisper
from tests.support.encoder_decoder_requests import noise_image, write_wav


@dataclass(frozen=True)
class FixedEncoder:
    """An encoder of a fixed length, all of whose rows are visible to every token."""

    max_encoder_len: int = 100
    input_vocab_size: int = 400

    def encoder_view(self, entry: EncoderInput | None, decoder_ids: Sequence[int]) -> EncoderView:
        rows = 0 if entry is None else entry.num_tokens
        return EncoderView(0, rows, rows)


TEXT = "The rain in spain falls mainly on the"
BLOCK_SIZE = 4


def limits(vocab_size: int) -> InputLimits:
    return InputLimits(64, 8, vocab_size, vocab_size, BLOCK_SIZE, 64, torch.float32)


class Family:
    """The input processing of one seeded checkpoint."""

    def __init__(self, folder: Path, encoder: FixedEncoder) -> None:
        self.checkpoint = Checkpoint.open(str(folder))
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        bounds = limits(encoder.input_vocab_size)
        family = FAMILIES.find(self.checkpoint.architecture)
        assert family is not None
        self.inputs = family.prompts(PromptSources(self.checkpoint, encoder, tokenizer, bounds, 0))
        self.requests = InputProcessor(
            tokenizer, self.inputs, FitCheck(bounds), eos_token_ids=[2], seed=0, generation={}
        )

    def completions(self, prompt: Prompt, params: SamplingParams, **options: Any) -> list[Request]:
        new = NewRequest("r", prompt, params, **options)
        return self.requests.process(new)

    def request(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any):
        return self.completions(prompt, params or SamplingParams(), **options)[0]


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(build_bart(tmp_path_factory.mktemp("bart")), FixedEncoder(32, 768))


@pytest.fixture(scope="module")
def whisper_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def whisper(whisper_folder: Path) -> Family:
    return Family(whisper_folder, FixedEncoder(100, 1000))


@pytest.mark.parametrize("prompt", [TEXT, TextPrompt(TEXT)])
def test_a_text_alone_goes_to_the_encoder_and_the_decoder_gets_its_default(
    prompt: Prompt, bart: Family
) -> None:
    request = bart.request(prompt)
    ids = bart.tokenizer(TEXT)["input_ids"]
    assert (ids[0], ids[-1]) == (0, 2), "the checkpoint's own special tokens"
    assert request.encoder_input.token_ids == tuple(ids)
    assert request.encoder_input.num_tokens == len(ids)
    assert request.encoder_input.text == TEXT
    assert request.token_ids == [2, 0]
    assert request.num_prompt_tokens == 2


@pytest.mark.parametrize("encoder", [TEXT, TextPrompt(TEXT), TokensPrompt((0, 9, 2))])
@pytest.mark.parametrize("decoder", [None, "the", TextPrompt("the"), TokensPrompt((9, 8))])
def test_both_sides_of_a_pair_may_have_any_form(encoder: Any, decoder: Any, bart: Family) -> None:
    request = bart.request(ExplicitEncoderDecoderPrompt(encoder, decoder))
    assert request.encoder_input.token_ids == bart.request(encoder).encoder_input.token_ids
    ids = {None: [2, 0], TokensPrompt((9, 8)): [2, 9, 8]}
    the = [2, *bart.tokenizer("the")["input_ids"][:-1]]
    assert request.token_ids == ids.get(decoder, the)


def test_ids_suppressed_by_the_checkpoint_and_by_the_user_are_masked(
    whisper: Family,
) -> None:
    generation = whisper.checkpoint.generation_config
    assert generation is not None
    params = SamplingParams(suppress_token_ids=(5, generation.suppress_tokens[0]))
    state = whisper.request(AudioPrompt(sine(0.1), language="en"), params).sampling
    always = {5, *generation.suppress_tokens}
    assert set(state.masked_ids.tolist()) == always | set(generation.begin_suppress_tokens)
    state.append(7)
    assert set(state.masked_ids.tolist()) == always


def test_suppressed_ids_that_two_configs_name_are_reported_once(whisper: Family) -> None:
    generation = whisper.checkpoint.generation_config
    assert generation is not None
    reported = InputProcessor(
        whisper.tokenizer,
        whisper.inputs,
        FitCheck(limits(1000)),
        eos_token_ids=[2],
        seed=0,
        generation=vars(generation),
    ).checkpoint_token_ids
    suppressed = f"{generation.suppress_tokens} (generation_config.json)"
    assert reported["suppress_token_ids"] == suppressed
    begin = f"{generation.begin_suppress_tokens} (generation_config.json)"
    assert reported["begin_suppress_token_ids"] == begin


def hashes(request: Any) -> list[bytes]:
    request.extend_hashes(BLOCK_SIZE)
    assert request.block_hashes
    return request.block_hashes


def test_decoder_blocks_are_shared_only_with_equal_encoder_input(bart: Family) -> None:
    decoder = TokensPrompt((2, 0, *range(10, 21)))

    def blocks(encoder: str, tail: tuple[int, ...] = (), **options: Any) -> list[bytes]:
        ids = TokensPrompt((*decoder.prompt_token_ids, *tail))
        return hashes(bart.request(ExplicitEncoderDecoderPrompt(encoder, ids), **options))

    base = blocks(TEXT)
    assert blocks(TEXT) == base
    assert blocks(TEXT, (30, 31, 32))[: len(base)] == base, "for any length of the sequence"
    assert blocks(TEXT, params=SamplingParams(max_tokens=9)) == base
    assert not {*blocks("another text")} & {*base}
    assert not {*blocks(TEXT, cache_salt="a")} & {*base}


WRONG = {
    "audio": (AudioPrompt("a.wav"), "takes text or token ids, but the encoder prompt is audio"),
    "an image": (ImagePrompt("a.png"), "the encoder prompt is an image"),
    "embeddings": (EmbedsPrompt(torch.zeros(2, 8)), "the encoder prompt is embeddings"),
    "a pair in a pair": (
        ExplicitEncoderDecoderPrompt(ExplicitEncoderDecoderPrompt(TEXT)),
        "the encoder prompt is itself a pair of prompts",
    ),
    "nothing": (None, "the encoder prompt is missing"),
    "no ids": (TokensPrompt(()), "the prompt is empty"),
    "unknown ids": (TokensPrompt((0, 768)), "prompt token 1 is 768"),
    "too long": (TokensPrompt((5,) * 33), "has 33 tokens, but the model's encoder takes 32"),
    "a decoder prompt that is too long": (
        ExplicitEncoderDecoderPrompt(TEXT, TokensPrompt((5,) * 64)),
        "the prompt has 65 tokens.* max_model_len is 64",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_unsupported_prompts_of_a_text_to_text_model_are_refused(kind: str, bart: Family) -> None:
    prompt, expected = WRONG[kind]
    with pytest.raises(ValueError, match=expected):
        bart.request(prompt)


@pytest.mark.parametrize("content", [[{"type": "audio"}], [{"type": "audio"}, {"text": " "}], ""])
def test_a_speech_model_accepts_a_chat_of_one_sound(content: Any, whisper: Family) -> None:
    sound = AudioPrompt(sine(0.1), language="en")
    expected = whisper.request(sound)
    chat = ChatPrompt(({"role": "user", "content": content},), {"audio": [sound]})
    found = whisper.request(chat)
    assert found.token_ids == expected.token_ids
    assert found.encoder_input is not None and expected.encoder_input is not None
    assert found.encoder_input.content_hash == expected.encoder_input.content_hash
    plain = ChatPrompt(chat.messages, {"audio": [sine(0.1)]})
    assert whisper.request(plain).encoder_input.content_hash == expected.encoder_input.content_hash


@pytest.mark.parametrize(
    ("words", "shown", "got"),
    [
        ([{"type": "text", "text": "What?"}], {"audio": ["a.wav"]}, "got 1 audio and text"),
        ("What?", {}, "got text"),
        ([], {"audio": ["a.wav", "b.wav"]}, "got 2 audio"),
        ([], {"audio": ["a.wav"], "image": ["a.png"]}, "got 1 image and 1 audio"),
        ([], {}, "got nothing"),
        (3, {"audio": ["a.wav"]}, "got 1 audio and text"),
    ],
)
def test_a_speech_model_refuses_a_chat_that_is_not_one_sound(
    words: Any, shown: Any, got: str, whisper: Family
) -> None:
    message = f"of a chat one sound without words: .*no earlier turns; {got}"
    with pytest.raises(ValueError, match=message):
        whisper.request(ChatPrompt(({"role": "user", "content": words},), shown))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (ExplicitEncoderDecoderPrompt(TEXT, TEXT), "no encoder beside its decoder"),
        (ExplicitEncoderDecoderPrompt(TEXT), "no encoder beside its decoder"),
        (ExplicitEncoderDecoderPrompt(AudioPrompt("a.wav"), TEXT), "no encoder beside its decoder"),
        (ExplicitEncoderDecoderPrompt(AudioPrompt("a.wav")), "reads text and takes no sound"),
        (AudioPrompt("a.wav"), "reads text and takes no sound"),
        (ImagePrompt("a.png"), "reads text and takes no images"),
    ],
)
def test_a_decoder_only_model_takes_no_encoder_prompt(
    prompt: Prompt, expected: str, bart: Family
) -> None:
    sources = PromptSources(bart.checkpoint, None, bart.tokenizer, limits(768), 0)
    decoder_only = InputProcessor(
        bart.tokenizer,
        PlainPromptProcessor(sources),
        FitCheck(limits(768)),
        eos_token_ids=[2],
        seed=0,
        generation={},
    )
    with pytest.raises(ValueError, match=expected):
        decoder_only.process(NewRequest("r", prompt))


def test_a_missing_generation_config_is_made_from_the_config(tmp_path: Path) -> None:
    folder = build_bart(tmp_path)
    (folder / "generation_config.json").unlink()
    bart = Family(folder, FixedEncoder(32, 768))
    assert bart.checkpoint.generation_config is None
    assert bart.request(TEXT).token_ids == [2, 0]
    assert GenerationConfig.from_model_config(BartConfig()).decoder_start_token_id == 2


def bart_tokenizer() -> PreTrainedTokenizerBase:
    """Tokenizer with the special ids of BART: 0 is BOS, 1 padding, 2 EOS."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "the", "rain", "in", "spain"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def rule_sources(config: Any, tokenizer: Any) -> PromptSources:
    checkpoint: Any = SimpleNamespace(config=config)
    return PromptSources(checkpoint, None, tokenizer, limits(config.vocab_size))


def bart_rule(**overrides: Any) -> DecoderPromptRule:
    config = BartConfig(**overrides)
    generation = GenerationConfig.from_model_config(config)
    generation.update(**overrides)
    return DecoderPromptRule(rule_sources(config, bart_tokenizer()), generation)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, [2, 0]),
        ({"forced_bos_token_id": 7}, [2, 7]),  # before the tokenizer's
        ({"bos_token_id": None}, [2]),
        ({"bos_token_id": 2}, [2]),  # not repeated
    ],
)
def test_the_default_prompt_is_the_start_token_and_bos(
    overrides: dict[str, Any], expected: list[int]
) -> None:
    assert bart_rule(**overrides).prompt_ids("any", None) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((2, 0, 51, 178, 2), [2, 0, 51, 178, 2]),
        ((0, 51, 178, 2), [2, 0, 51, 178, 2]),
        ((51, 178), [2, 51, 178]),
        ((2,), [2]),
    ],
)
def test_the_start_token_is_prepended_if_missing(
    given: tuple[int, ...], expected: list[int]
) -> None:
    assert bart_rule().prompt_ids("any", TokensPrompt(given)) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("the rain", [2, 0, 4, 5]),
        (TextPrompt("the rain"), [2, 0, 4, 5]),
        (TextPrompt("the rain", add_special_tokens=False), [2, 4, 5]),
        ("", [2, 0]),
        ("the </s>", [2, 0, 4, 2, 2]),
        (TextPrompt("the </s>", add_special_tokens=False), [2, 4, 2]),
        ("</s> the", [2, 0, 2, 4]),
    ],
)
def test_only_the_eos_added_by_the_tokenizer_is_removed(given: object, expected: list[int]) -> None:
    assert bart_rule().prompt_ids("any", given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (TokensPrompt(()), "the prompt is empty"),
        (TokensPrompt((5, 60_000)), "prompt token 1 is 60000"),
        (TextPrompt("", add_special_tokens=False), "the prompt is empty"),
        (EmbedsPrompt(torch.zeros(2, 4)), "decoder takes text or token ids, .* is embeddings"),
        (AudioPrompt("a.wav"), "decoder takes text or token ids, but the decoder prompt is audio"),
        (ImagePrompt("a.png"), "decoder prompt is an image"),
        (ChatPrompt(({"role": "user", "content": "x"},)), "no chat template"),
        (3, "decoder prompt is a int"),
    ],
)
def test_unsupported_decoder_prompts_are_refused(given: object, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        bart_rule().prompt_ids("any", given)


def test_a_checkpoint_must_name_its_start_token() -> None:
    with pytest.raises(ValueError, match="no decoder_start_token_id or bos_token_id"):
        bart_rule(decoder_start_token_id=None, bos_token_id=None)


@pytest.mark.parametrize("start", [None, 5])
@pytest.mark.parametrize("given", [None, (7, 8), (0, 7), (5, 7)])
def test_t5_begins_as_in_generate(start: int | None, given: tuple[int, ...] | None) -> None:
    named = {} if start is None else {"decoder_start_token_id": start}
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model: Any = T5ForConditionalGeneration(config)
    model.generation_config.update(**({"decoder_start_token_id": 0} | named))
    extra = {} if given is None else {"decoder_input_ids": torch.tensor([given])}
    out = model.generate(torch.tensor([[4, 5, 1]]), max_new_tokens=1, do_sample=False, **extra)
    # Without its own start token, generate() requires one; T5 uses padding.
    generation = GenerationConfig.from_model_config(config)
    generation.update(**named)
    rule = T5PromptRule(rule_sources(config, None), generation)
    prompt = None if given is None else TokensPrompt(given)
    assert rule.prompt_ids("any", prompt) == out[0, :-1].tolist()


Model = WhisperForConditionalGeneration
Settings = dict[str, Any]


@pytest.fixture(scope="module")
def whisper_model(whisper_folder: Path) -> Model:
    return Model.from_pretrained(whisper_folder)


def whisper_rule(
    model: Model, settings: Settings | None = None, tokenizer: Any = None
) -> WhisperPromptRule:
    generation = generation_of(model, settings)
    return WhisperPromptRule(rule_sources(model.config, tokenizer), generation)


def generation_of(model: Model, settings: Settings | None) -> GenerationConfig:
    generation = deepcopy(model.generation_config)
    for name, value in (settings or {}).items():
        setattr(generation, name, value)
    return generation


def begun_by_generate(model: Model, settings: Settings | None, **request: Any) -> list[list[int]]:
    """Decoder inputs of ``generate`` up to the first token, recorded by a hook."""
    seen: list[list[int]] = []

    def note(module: object, args: object, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["input_ids"][0].tolist())

    hook = model.model.decoder.register_forward_pre_hook(note, with_kwargs=True)
    try:
        features = torch.zeros(1, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        model.generate(
            features,
            generation_config=generation_of(model, settings),
            max_new_tokens=1,
            attention_mask=torch.ones_like(features[:, 0]),
            **request,
        )
    finally:
        hook.remove()
    return seen


SETTINGS: dict[str, dict[str, Any]] = {
    "as published": {},
    "a language": {"language": "de"},
    "a task": {"task": "translate", "language": "<|zh|>"},
    "timestamps": {"return_timestamps": True, "language": "en"},
}
WISHES: dict[str, dict[str, Any]] = {
    "none": {},
    "a code": {"language": "zh"},
    "a name": {"language": "German"},
    "a token": {"language": "<|en|>"},
    "a task": {"language": "en", "task": "translate"},
    "the usual task": {"language": "en", "task": "transcribe"},
    "timestamps": {"language": "en", "return_timestamps": True},
    "no timestamps": {"language": "en", "return_timestamps": False},
}


# If no language is given, generate() runs the model once more to detect it.
NAMED = [(s, w) for s in SETTINGS for w in WISHES if "language" in SETTINGS[s] | WISHES[w]]


@pytest.mark.parametrize(("settings", "wishes"), NAMED)
def test_whisper_begins_as_in_generate(settings: str, wishes: str, whisper_model: Model) -> None:
    configured, wished = SETTINGS[settings], WISHES[wishes]
    asked = AudioPrompt(
        "any.wav",
        language=wished.get("language"),
        task=wished.get("task"),
        timestamps=wished.get("return_timestamps"),
    )
    found = whisper_rule(whisper_model, configured).prompt_ids(asked, None)
    assert [found] == begun_by_generate(whisper_model, configured, **wished)


def test_the_forced_ids_of_an_old_checkpoint_are_used(whisper_model: Model) -> None:
    known: Any = whisper_model.generation_config
    forced = [[1, known.lang_to_id["<|de|>"]], [2, known.task_to_id["translate"]]]
    settings = {"forced_decoder_ids": forced}
    found = whisper_rule(whisper_model, settings).prompt_ids(AudioPrompt("any.wav"), None)
    assert [found] == begun_by_generate(whisper_model, settings)
    assert found[1:3] == [token_id for _, token_id in forced]


@pytest.mark.parametrize("wishes", [{}, {"task": "translate"}, {"return_timestamps": True}])
@pytest.mark.parametrize("forced", [None, [[1, None]], [[1, None], [2, "transcribe"]]])
def test_a_language_not_given_is_chosen_where_generate_detects_it(
    wishes: Settings, forced: list[list[Any]] | None, whisper_model: Model
) -> None:
    known: Any = whisper_model.generation_config
    settings: dict[str, Any] = {}
    if forced is not None:
        ids = {None: None} | known.task_to_id
        settings["forced_decoder_ids"] = [[index, ids[name]] for index, name in forced]
    detecting, *_, expected = begun_by_generate(whisper_model, settings, **wishes)
    rule = whisper_rule(whisper_model, settings)
    asked = AudioPrompt(
        "any.wav", task=wishes.get("task"), timestamps=wishes.get("return_timestamps")
    )
    choice = rule.prompt_choice(asked, None)
    assert choice is not None
    assert rule.prompt_ids(asked, None) == detecting
    assert set(choice.candidates) == set(known.lang_to_id.values())
    assert expected[1] in choice.candidates
    if "task" not in wishes and "transcribe" not in str(forced):
        # generate() omits the task here, and models write nonsense.
        expected.insert(2, known.task_to_id["transcribe"])
    assert (*detecting, expected[1], *choice.then) == tuple(expected)


def test_a_given_language_or_decoder_prompt_leaves_no_choice(whisper_model: Model) -> None:
    rule, audio = whisper_rule(whisper_model), AudioPrompt("any.wav")
    assert rule.prompt_choice(AudioPrompt("any.wav", language="en"), None) is None
    assert whisper_rule(whisper_model, {"language": "de"}).prompt_choice(audio, None) is None
    assert rule.prompt_choice(audio, TokensPrompt((9, 10))) is None


def test_an_english_only_model_refuses_a_language(whisper_model: Model) -> None:
    settings = {"is_multilingual": False, "lang_to_id": None, "task_to_id": None}
    rule = whisper_rule(whisper_model, settings)
    known: Any = whisper_model.generation_config
    assert rule.prompt_choice(AudioPrompt("any.wav"), None) is None
    start = [known.decoder_start_token_id, known.no_timestamps_token_id]
    assert rule.prompt_ids(AudioPrompt("any.wav"), None) == start
    with pytest.raises(ValueError, match="knows English only"):
        rule.prompt_ids(AudioPrompt("any.wav", language="en"), None)


@pytest.mark.parametrize(
    ("wishes", "settings", "expected"),
    [
        ({"language": "klingon"}, {}, "language 'klingon' is unknown .* knows de, en, zh"),
        ({"language": "es"}, {}, "language 'es' is unknown .* knows de, en, zh"),
        ({"language": "en", "task": "sing"}, {}, "task 'sing' is unknown .* transcribe, translate"),
        (
            {"language": "en", "timestamps": True},
            {"no_timestamps_token_id": None},
            "timestamps are not to be had",
        ),
    ],
)
def test_unsupported_languages_tasks_and_timestamps_are_errors(
    wishes: Settings, settings: Settings, expected: str, whisper_model: Model
) -> None:
    with pytest.raises(ValueError, match=expected):
        whisper_rule(whisper_model, settings).prompt_ids(AudioPrompt("any.wav", **wishes), None)


def test_whispers_decoder_prompt_may_begin_with_previous_text(whisper_model: Model) -> None:
    known: Any = whisper_model.generation_config
    start, previous = known.decoder_start_token_id, known.prev_sot_token_id
    rule, audio = whisper_rule(whisper_model), AudioPrompt("any.wav")
    assert rule.prompt_ids(audio, TokensPrompt((previous, 9, start))) == [previous, 9, start]
    assert rule.prompt_ids(audio, TokensPrompt((9, 10))) == [start, 9, 10]


def test_whispers_decoder_text_is_used_unchanged(whisper: Family, whisper_model: Model) -> None:
    rule = whisper_rule(whisper_model, tokenizer=whisper.tokenizer)
    text = "<|startoftranscript|><|zh|><|translate|><|notimestamps|>"
    asked = AudioPrompt("any.wav", language="zh", task="translate")
    expected = rule.prompt_ids(asked, None)
    for prompt in (text, TextPrompt(text)):
        assert rule.prompt_ids(AudioPrompt("any.wav"), prompt) == expected
    with pytest.raises(ValueError, match="language and task cannot stand beside a decoder prompt"):
        rule.resolved(asked, text)


RATE = 16_000
EXTRACTOR = WhisperFeatureExtractor(feature_size=16, chunk_length=1)


def encoder_sources(folder: Path, max_len: int) -> PromptSources:
    checkpoint: Any = SimpleNamespace(path=folder, trust_remote_code=False)
    return PromptSources(checkpoint, SimpleNamespace(max_encoder_len=max_len), None, limits(64))


@cache
def speech_inputs() -> AudioEncoderInputs:
    with TemporaryDirectory() as folder:
        EXTRACTOR.save_pretrained(folder)
        return AudioEncoderInputs(encoder_sources(Path(folder), 50))


def sine(seconds: float, hertz: float = 300.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * RATE)) / RATE).astype(np.float32)


def make(prompt: object, salt: str | None = None):
    return speech_inputs().make(prompt, cache_salt=salt)


@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray, lambda x: x.astype(np.float64)])
def test_samples_become_the_extractors_features(kind) -> None:
    samples = sine(0.7)
    made = make(AudioPrompt(kind(samples)))
    expected = EXTRACTOR(samples, sampling_rate=RATE, return_tensors="pt")["input_features"][0]
    assert torch.equal(made.features["input_features"], expected)
    assert made.num_tokens == 50
    assert made.token_ids == ()


def test_the_hash_of_a_sound_depends_on_its_samples_alone(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", sine(0.5))
    samples = np.round(sine(0.5) * 32767).astype(np.float32) / 32768
    hashes = {
        make(AudioPrompt(path)).content_hash,
        make(AudioPrompt(str(path), sampling_rate=RATE)).content_hash,
        make(AudioPrompt(samples, language="fr", task="translate")).content_hash,
    }
    assert len(hashes) == 1, "decoder options do not change the encoder input"


def test_different_sounds_and_salts_have_different_hashes() -> None:
    prompts = [AudioPrompt(sine(0.5)), AudioPrompt(sine(0.5, hertz=301)), AudioPrompt(sine(0.6))]
    hashes = {make(prompt, salt).content_hash for prompt in prompts for salt in (None, "", "a")}
    assert len(hashes) == 9


def test_a_sound_longer_than_a_window_becomes_several(tmp_path: Path) -> None:
    assert isinstance(make(AudioPrompt(sine(1.0))), EncoderInput)
    longer = sine(1.25)
    for audio in (longer, write_wav(tmp_path / "a.wav", longer)):
        assert make(AudioPrompt(audio)).num_frames == 125


NO_SPEECH = {
    "text": ("hello", "encoder takes audio .* but the encoder prompt is text"),
    "a text prompt": (TextPrompt("hello"), "the encoder prompt is text"),
    "token ids": (TokensPrompt((1, 2)), "the encoder prompt is token ids"),
    "an image": (ImagePrompt("a.png"), "the encoder prompt is an image"),
    "stereo": (AudioPrompt(np.zeros((2, 9), np.float32)), r"must be mono.*got shape \(2, 9\)"),
    "a list": (AudioPrompt([0.0, 0.1]), "got list"),
}


@pytest.mark.parametrize("kind", NO_SPEECH)
def test_invalid_sounds_are_refused(kind: str) -> None:
    prompt, expected = NO_SPEECH[kind]
    with pytest.raises(ValueError, match=expected):
        make(prompt)


def test_a_sampling_rate_other_than_the_files_is_refused(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", sine(0.1))
    with pytest.raises(ValueError, match="has 16000 samples per second, but the prompt says"):
        make(AudioPrompt(path, sampling_rate=8_000))


def test_the_extractor_comes_from_the_checkpoint(tmp_path: Path) -> None:
    EXTRACTOR.save_pretrained(tmp_path)
    maker = AudioFeatureMaker(load_extractor(tmp_path))
    maker.make(AudioPrompt(sine(1.0)))
    with pytest.raises(ValueError, match="the model takes 1 s at most"):
        maker.make(AudioPrompt(sine(1.1)))


def test_a_checkpoint_without_the_right_extractor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="feature extractor in .* cannot be loaded"):
        AudioEncoderInputs(encoder_sources(tmp_path, 100))
    SeamlessM4TFeatureExtractor(feature_size=16, num_mel_bins=16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a SeamlessM4T.*must make spectrograms of windows"):
        AudioEncoderInputs(encoder_sources(tmp_path, 100))


NAMES = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
PROCESSOR = MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=4)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> ImageEncoderInputs:
    folder = tmp_path_factory.mktemp("processor")
    PROCESSOR.save_pretrained(folder)
    return ImageEncoderInputs(encoder_sources(folder, 68), feature_names=NAMES)


def test_an_image_becomes_the_processors_tiles(inputs: ImageEncoderInputs) -> None:
    made = inputs.make(ImagePrompt(noise_image(40, 20)), cache_salt=None)
    expected = PROCESSOR(noise_image(40, 20), return_tensors="pt")
    assert made.features.keys() == set(NAMES)
    for name in NAMES:
        assert torch.equal(made.features[name], expected[name][0])
    assert made.num_tokens == 68


def test_the_hash_of_an_image_depends_on_its_pixels_and_the_salt(
    inputs: ImageEncoderInputs, tmp_path: Path
) -> None:
    path, image = tmp_path / "a.png", noise_image(40, 20)
    image.save(path)
    images = [path, str(path), image, noise_image(40, 20, 1)]
    hashes = [inputs.make(ImagePrompt(image), cache_salt=None).content_hash for image in images]
    assert len({*hashes[:3]}) == 1
    assert hashes[3] != hashes[0]
    salted = inputs.make(ImagePrompt(image), cache_salt="a").content_hash
    assert salted != hashes[0]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", "encoder takes an image, but the encoder prompt is text"),
        (AudioPrompt("a.wav"), "the encoder prompt is audio"),
        (ImagePrompt(3), "image must be a file, an image of Pillow or an array of pixels, got int"),
    ],
)
def test_prompts_without_an_image_are_refused(
    prompt: object, expected: str, inputs: ImageEncoderInputs
) -> None:
    with pytest.raises(ValueError, match=expected):
        inputs.make(prompt, cache_salt=None)


def test_a_checkpoint_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="image processor in .* cannot be loaded"):
        load_image_processor(tmp_path)
