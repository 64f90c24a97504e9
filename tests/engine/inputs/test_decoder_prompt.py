"""Decoder prompts begin as transformers' ``generate`` begins them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    WhisperForConditionalGeneration,
)

from engine import (
    AudioPrompt,
    ChatPrompt,
    EmbedsPrompt,
    ImagePrompt,
    TextPrompt,
    TokensPrompt,
)
from engine.inputs.encoder_decoder_inputs import DecoderPromptRule
from engine.inputs.prompt_tokens import InputLimits
from engine.models.seq2seq.families import T5PromptRule
from engine.models.whisper.whisper import WhisperPromptRule
from engine.text.tokenizer import load_tokenizer
from omni.seeded.encoder_decoders import build_whisper


def bart_tokenizer() -> PreTrainedTokenizerBase:
    """BART's special ids: 0 begins, 1 pads, 2 ends."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "the", "rain", "in", "spain"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def limits(vocab_size: int) -> InputLimits:
    return InputLimits(64, 8, vocab_size, vocab_size, 4, 64, torch.float32)


def bart(**overrides: Any) -> DecoderPromptRule:
    config = BartConfig(**overrides)
    generation = GenerationConfig.from_model_config(config)
    generation.update(**overrides)
    return DecoderPromptRule(config, generation, bart_tokenizer(), limits(config.vocab_size))


def test_the_default_is_the_start_token_and_bos() -> None:
    assert bart().prompt_ids("any", None) == [2, 0]


def test_a_bos_that_generate_forces_comes_before_the_tokenizers() -> None:
    assert bart(forced_bos_token_id=7).prompt_ids("any", None) == [2, 7]


def test_a_checkpoint_without_bos_begins_with_its_start_token_alone() -> None:
    assert bart(bos_token_id=None).prompt_ids("any", None) == [2]
    assert bart(bos_token_id=2).prompt_ids("any", None) == [2], "it is not said twice"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((2, 0, 51, 178, 2), [2, 0, 51, 178, 2]),
        ((0, 51, 178, 2), [2, 0, 51, 178, 2]),
        ((51, 178), [2, 51, 178]),
        ((2,), [2]),
    ],
)
def test_the_start_token_is_put_before_ids_that_lack_it(
    given: tuple[int, ...], expected: list[int]
) -> None:
    assert bart().prompt_ids("any", TokensPrompt(given)) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("the rain", [2, 0, 4, 5]),
        (TextPrompt("the rain"), [2, 0, 4, 5]),
        (TextPrompt("the rain", add_special_tokens=False), [2, 4, 5]),
        ("", [2, 0]),
        ("the </s>", [2, 0, 4, 2, 2]),
        (TextPrompt("the </s>", add_special_tokens=False), [2, 4, 2]),
    ],
)
def test_text_goes_on_instead_of_ending(given: object, expected: list[int]) -> None:
    assert bart().prompt_ids("any", given) == expected


def test_an_end_that_the_text_itself_has_is_kept() -> None:
    assert bart().prompt_ids("any", "</s> the") == [2, 0, 2, 4]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (TokensPrompt(()), "the prompt is empty"),
        (TokensPrompt((5, 60_000)), "prompt token 1 is 60000"),
        (TextPrompt("", add_special_tokens=False), "the prompt is empty"),
        (EmbedsPrompt(torch.zeros(2, 4)), "decoder takes text or token ids, .* is embeddings"),
        (AudioPrompt("a.wav"), "decoder prompt is audio"),
        (ImagePrompt("a.png"), "decoder prompt is an image"),
        (ChatPrompt(({"role": "user", "content": "x"},)), "no chat template"),
        (3, "decoder prompt is a int"),
    ],
)
def test_other_decoder_prompts_are_refused(given: object, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        bart().prompt_ids("any", given)


def test_a_checkpoint_must_name_its_start_token() -> None:
    with pytest.raises(ValueError, match="no decoder_start_token_id or bos_token_id"):
        bart(decoder_start_token_id=None, bos_token_id=None)


@pytest.mark.parametrize("start", [None, 5])
@pytest.mark.parametrize("given", [None, (7, 8), (0, 7), (5, 7)])
def test_t5_begins_as_generate_has_it(start: int | None, given: tuple[int, ...] | None) -> None:
    named = {} if start is None else {"decoder_start_token_id": start}
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model: Any = T5ForConditionalGeneration(config)
    model.generation_config.update(**({"decoder_start_token_id": 0} | named))
    extra = {} if given is None else {"decoder_input_ids": torch.tensor([given])}
    out = model.generate(torch.tensor([[4, 5, 1]]), max_new_tokens=1, do_sample=False, **extra)
    # Without a start token of its own, generate() needs to be told; padding is T5's.
    generation = GenerationConfig.from_model_config(config)
    generation.update(**named)
    rule = T5PromptRule(config, generation, None, limits(20))
    prompt = None if given is None else TokensPrompt(given)
    assert rule.prompt_ids("any", prompt) == out[0, :-1].tolist()


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> WhisperForConditionalGeneration:
    folder = build_whisper(tmp_path_factory.mktemp("whisper"))
    return WhisperForConditionalGeneration.from_pretrained(folder)


def whisper_rule(
    model: WhisperForConditionalGeneration, settings: dict[str, Any] | None = None
) -> WhisperPromptRule:
    return WhisperPromptRule(
        model.config, generation_of(model, settings), None, limits(model.config.vocab_size)
    )


def generation_of(
    model: WhisperForConditionalGeneration, settings: dict[str, Any] | None
) -> GenerationConfig:
    generation = deepcopy(model.generation_config)
    for name, value in (settings or {}).items():
        setattr(generation, name, value)
    return generation


def begun_by_generate(
    model: WhisperForConditionalGeneration, settings: dict[str, Any] | None, **request: Any
) -> list[list[int]]:
    """What ``generate`` gives the decoder, read off where it runs up to the first token."""
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


# Where nobody names a language, generate() runs the model once more to detect it.
NAMED = [(s, w) for s in SETTINGS for w in WISHES if "language" in SETTINGS[s] | WISHES[w]]


@pytest.mark.parametrize(("settings", "wishes"), NAMED)
def test_whisper_begins_as_generate_has_it(
    settings: str, wishes: str, whisper: WhisperForConditionalGeneration
) -> None:
    configured, wished = SETTINGS[settings], WISHES[wishes]
    asked = AudioPrompt(
        "any.wav",
        language=wished.get("language"),
        task=wished.get("task"),
        timestamps=wished.get("return_timestamps"),
    )
    found = whisper_rule(whisper, configured).prompt_ids(asked, None)
    assert [found] == begun_by_generate(whisper, configured, **wished)


def test_an_old_checkpoints_forced_ids_are_taken(
    whisper: WhisperForConditionalGeneration,
) -> None:
    known: Any = whisper.generation_config
    forced = [[1, known.lang_to_id["<|de|>"]], [2, known.task_to_id["translate"]]]
    settings = {"forced_decoder_ids": forced}
    found = whisper_rule(whisper, settings).prompt_ids(AudioPrompt("any.wav"), None)
    assert [found] == begun_by_generate(whisper, settings)
    assert found[1:3] == [token_id for _, token_id in forced]


@pytest.mark.parametrize("wishes", [{}, {"task": "translate"}, {"return_timestamps": True}])
@pytest.mark.parametrize("forced", [None, [[1, None]], [[1, None], [2, "transcribe"]]])
def test_a_language_that_nobody_named_is_chosen_where_generate_detects_it(
    wishes: dict[str, Any],
    forced: list[list[Any]] | None,
    whisper: WhisperForConditionalGeneration,
) -> None:
    known: Any = whisper.generation_config
    settings: dict[str, Any] = {}
    if forced is not None:
        ids = {None: None} | known.task_to_id
        settings["forced_decoder_ids"] = [[place, ids[name]] for place, name in forced]
    detecting, *_, expected = begun_by_generate(whisper, settings, **wishes)
    rule = whisper_rule(whisper, settings)
    asked = AudioPrompt(
        "any.wav", task=wishes.get("task"), timestamps=wishes.get("return_timestamps")
    )
    choice = rule.prompt_choice(asked, None)
    assert choice is not None
    assert rule.prompt_ids(asked, None) == detecting
    assert set(choice.candidates) == set(known.lang_to_id.values())
    assert expected[1] in choice.candidates
    if "task" not in wishes and "transcribe" not in str(forced):
        # generate() leaves the task out here, and models write nonsense.
        expected.insert(2, known.task_to_id["transcribe"])
    assert (*detecting, expected[1], *choice.then) == tuple(expected)


def test_a_named_language_or_a_prompt_of_ones_own_leaves_nothing_to_choose(
    whisper: WhisperForConditionalGeneration,
) -> None:
    rule, audio = whisper_rule(whisper), AudioPrompt("any.wav")
    assert rule.prompt_choice(AudioPrompt("any.wav", language="en"), None) is None
    assert whisper_rule(whisper, {"language": "de"}).prompt_choice(audio, None) is None
    assert rule.prompt_choice(audio, TokensPrompt((9, 10))) is None


def test_an_english_model_needs_no_language_and_takes_none(
    whisper: WhisperForConditionalGeneration,
) -> None:
    settings = {"is_multilingual": False, "lang_to_id": None, "task_to_id": None}
    rule = whisper_rule(whisper, settings)
    known: Any = whisper.generation_config
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
def test_wishes_that_a_checkpoint_cannot_fulfil_are_errors(
    wishes: dict[str, Any],
    settings: dict[str, Any],
    expected: str,
    whisper: WhisperForConditionalGeneration,
) -> None:
    with pytest.raises(ValueError, match=expected):
        whisper_rule(whisper, settings).prompt_ids(AudioPrompt("any.wav", **wishes), None)


def test_whispers_decoder_prompt_may_begin_with_what_was_said_before(
    whisper: WhisperForConditionalGeneration,
) -> None:
    known: Any = whisper.generation_config
    start, previous = known.decoder_start_token_id, known.prev_sot_token_id
    rule, audio = whisper_rule(whisper), AudioPrompt("any.wav")
    assert rule.prompt_ids(audio, TokensPrompt((previous, 9, start))) == [previous, 9, start]
    assert rule.prompt_ids(audio, TokensPrompt((9, 10))) == [start, 9, 10]


def test_whispers_decoder_text_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = build_whisper(tmp_path)
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    known: Any = model.generation_config
    bounds = limits(model.config.vocab_size)
    rule = WhisperPromptRule(model.config, known, load_tokenizer(folder), bounds)
    text = "<|startoftranscript|><|zh|><|translate|><|notimestamps|>"
    asked = AudioPrompt("any.wav", language="zh", task="translate")
    expected = rule.prompt_ids(asked, None)
    for prompt in (text, TextPrompt(text)):
        assert rule.prompt_ids(AudioPrompt("any.wav"), prompt) == expected
    with pytest.raises(ValueError, match="language and task cannot stand beside a decoder prompt"):
        rule.prompt_ids(asked, text)
