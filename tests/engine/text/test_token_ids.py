"""Loading tokenizers, and running doubtful patterns where they can be stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    GenerationConfig,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from engine.text import tokenizer as tokenizer_module
from engine.text.stop_checker import IncrementalDetokenizer
from engine.text.tokenizer import (
    doubtful_patterns,
    eos_token_ids,
    load_tokenizer,
    patterns_of_decoder,
    raise_panic,
    token_ids,
)
from tests.support.tokenizers import TOKENIZERS, byte_level

CUBIC, EXPONENTIAL = "a*a*[cd]", "(a|aa)+c"
LONG_PIECE = "a" * 64 + "bc"
SLOW_TEXT = "a" * 3000 + "bc"


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = [
    # GPT-2, cl100k and Llama 3, Qwen2, Qwen3.5, CLIP, DeepSeek, and o200k.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES,
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES,
    CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + SPACES,
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
    tokenizer_module._O200K,
]


def cut_by(pattern: str, part: str = "pre_tokenizer") -> PreTrainedTokenizerBase:
    """A tokenizer of the letters a to d that applies a pattern first."""
    vocabulary = {piece: number for number, piece in enumerate([*"abcd[ x", LONG_PIECE])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="["))
    if part == "pre_tokenizer":
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), split])
    elif part == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(pattern), "x")])
    else:
        tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex(pattern), "x")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[")


def ids(tokenizer: PreTrainedTokenizerBase, text: str, seconds: float = 30.0) -> list[int]:
    return token_ids(tokenizer, text, add_special_tokens=True, seconds=seconds)


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_a_pattern_that_need_not_end_is_stopped_and_the_next_text_is_read(part: str) -> None:
    tokenizer = cut_by(CUBIC, part)
    assert ids(tokenizer, "abc ab") == tokenizer("abc ab")["input_ids"]
    with pytest.raises(ValueError, match=r"more than 0\.3 s .* for 3002 .*tokenizer_seconds"):
        ids(tokenizer, SLOW_TEXT, seconds=0.3)
    assert ids(tokenizer, "cab") == tokenizer("cab")["input_ids"]


def test_a_pattern_that_tries_too_often_is_told_as_an_error() -> None:
    tokenizer = cut_by(EXPONENTIAL)
    text = LONG_PIECE
    with pytest.raises(ValueError, match="cannot take this: .*retry-limit"):
        ids(tokenizer, text)
    assert ids(tokenizer, "bad") == tokenizer("bad")["input_ids"]
    # What it is without that: no Exception, so that it would end whatever thread it is in.
    with pytest.raises(BaseException, match="retry-limit") as caught:
        tokenizer(text)
    assert not isinstance(caught.value, Exception)
    with pytest.raises(ValueError, match="cannot take this"):
        raise_panic(caught.value)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, KeyError])
def test_nothing_else_is_taken_for_a_panic(kind: type[BaseException]) -> None:
    raise_panic(kind())


class BusyTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Does more than the library, as those of some families do."""

    def _encode_plus(self, text: str, **settings: bool) -> BatchEncoding:  # type: ignore[override]
        return super()._encode_plus(text.strip(), **settings)


@pytest.mark.parametrize("pattern", [CUBIC, r"\p{L}+"])
def test_a_pattern_that_nothing_could_stop_is_refused_with_its_checkpoint(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_by(pattern).save_pretrained(tmp_path)
    load = AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        AutoTokenizer,
        "from_pretrained",
        lambda folder, **_: BusyTokenizer(tokenizer_object=load(folder).backend_tokenizer),
    )
    trusted = load_tokenizer(tmp_path, trust_remote_code=True)
    assert trusted is not None and ids(trusted, " ab ") == trusted("ab")["input_ids"]
    if pattern != CUBIC:
        assert isinstance(load_tokenizer(tmp_path), BusyTokenizer)
        return
    with pytest.raises(ValueError, match=r"a\*a\*\[cd\].*BusyTokenizer cannot be run where"):
        load_tokenizer(tmp_path)


def test_a_checkpoint_that_makes_text_by_a_pattern_is_refused(tmp_path: Path) -> None:
    tokenizer = cut_by(CUBIC, "decoder")
    assert patterns_of_decoder(tokenizer) == (CUBIC,)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"makes text of tokens by the pattern 'a\*a\*\[cd\]'"):
        load_tokenizer(tmp_path)


def test_a_panic_in_making_text_is_told_as_an_error() -> None:
    detokenizer = IncrementalDetokenizer(cut_by("(a|aa)+c", "decoder"))
    with pytest.raises(ValueError, match="cannot take this"):
        detokenizer.append(7)


@pytest.mark.parametrize("name", [*TOKENIZERS, "seeded"])
def test_what_is_published_is_tokenized_here(
    name: str, seeded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TOKENIZERS[name]() if name in TOKENIZERS else load_tokenizer(seeded("qwen2"))
    assert tokenizer is not None
    assert doubtful_patterns(tokenizer) == () and patterns_of_decoder(tokenizer) == ()


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_are_patterns(pattern: str) -> None:
    tokenizer = cut_by(pattern)
    assert doubtful_patterns(tokenizer) == ()
    assert len(tokenizer.tokenize("a b  'd 123 ab")) >= 8


@pytest.mark.parametrize(
    "pattern",
    [
        " {2,}",
        "'s| ?ab",
        "aa*",
        "x?ab+c*d?",
        r"\s+",
        r"\n",
        r"[\n\r\t]",
        r"\s{2,}|[\n\r\t]",
        r"\d",
        r"\p{L}+",
        r"[^a-z\]]*",
        ".",
    ],
)
def test_a_run_of_one_kind_is_no_danger(pattern: str) -> None:
    assert doubtful_patterns(cut_by(pattern)) == ()


@pytest.mark.parametrize(
    "pattern",
    [
        CUBIC,
        EXPONENTIAL,
        "a+b",
        "a?b?c",
        "a+b+",
        "a||b",
        "a+?b",
        r"\s*[\r\n]+",
        "(a+)+",
        r"\s+$",
        "a{1000,}",
        "(?=a)",
        "[[a]b]+",
        r"(a)\1",
    ],
)
def test_anything_else_is_doubted(pattern: str) -> None:
    for part in ("pre_tokenizer", "normalizer"):
        assert doubtful_patterns(cut_by(pattern, part)) == (pattern,)


def test_a_text_beyond_the_longest_is_for_the_caller_to_refuse(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level().backend_tokenizer, model_max_length=4
    )
    ids = token_ids(tokenizer, "hello world, hello dog", add_special_tokens=True, seconds=5.0)
    assert len(ids) > 4
    assert not caplog.records


@pytest.mark.parametrize("name", ["qwen2", "llama", "bert"])
def test_a_loaded_tokenizer_is_the_one_of_transformers(name: str, seeded: Callable[[str], str]):
    folder = seeded(name)
    tokenizer, expected = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer is not None
    text = "The harbour wakes — 12 €."
    assert tokenizer(text)["input_ids"] == expected(text)["input_ids"]


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_a_missing_folder_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(ValueError, match="nowhere is no folder"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_damaged_tokenizer_is_an_error_that_names_the_folder(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{ damaged")
    with pytest.raises(ValueError, match=rf"{tmp_path.name} cannot be loaded"):
        load_tokenizer(tmp_path)


def generation_config(eos: int | list[int] | None) -> GenerationConfig:
    return GenerationConfig(eos_token_id=eos)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (Qwen2Config(eos_token_id=7), generation_config([8, 9]), {8, 9}),
        (Qwen2Config(eos_token_id=7), generation_config(None), {7}),
        (Qwen2Config(eos_token_id=7), None, {7}),
        (Qwen2Config(eos_token_id=[7, 6]), None, {7, 6}),
        (Qwen2Config(eos_token_id=0), None, {0}),
        (LlavaConfig(text_config=Qwen2Config(eos_token_id=5)), None, {5}),
    ],
)
def test_the_first_source_that_names_eos_is_believed(
    config: PreTrainedConfig, generation: GenerationConfig | None, expected: set[int]
):
    assert eos_token_ids(config, generation, byte_level()) == expected


def test_the_tokenizer_names_eos_when_no_config_does():
    config = Qwen2Config(eos_token_id=None)
    assert eos_token_ids(config, None, byte_level()) == {byte_level().eos_token_id}
    assert eos_token_ids(config, None, None) == frozenset()
    assert eos_token_ids(None, None, None) == frozenset()
