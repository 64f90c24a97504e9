"""The checkpoint's tokenizer, and the ids that end a sequence.

The regular expressions that a checkpoint's tokenizer brings, and which of them are no danger.

Texts are cut by them before they become tokens, and replaced. Their engine goes back and tries
again: what a pattern such as ``a*a*a*b`` takes for a text of a few hundred characters are minutes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from engine.interface.ownership import turn_of
from engine.text.chat_template import processor_chat_template
from engine.text.job_processes import JobProcesses

__all__ = [
    "PanicsAsErrors",
    "doubtful_patterns",
    "eos_token_ids",
    "load_tokenizer",
    "max_prompt_chars",
    "patterns_of_decoder",
    "token_ids",
    "tokenizers_turn",
]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# In front of the last alternative, which takes the same spaces, each is linear as well.
_LAST = r"|\s+"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)")

_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?"
    rf"{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
    rf"{'|'.join(_SPACES)}{_LAST}"
)
# A character or a class of them, and how often.
_LITERAL = r"[^\\\[\](){}*+?|.^$]|\\[^\W\d_pPkgKRXQE]|\\\W|\."
_CLASS = r"\\[pP]\{\^?\w+\}|\[(?:[^\[\]\\]|\\.)+\]"
_PIECE = re.compile(
    rf"(?:{_LITERAL}|{_CLASS})(?P<often>[*+?]|\{{\d{{1,3}}(?:,\d{{0,3}})?\}})?", re.DOTALL
)


def doubtful_patterns(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Patterns that are not known to take time that is linear in the text, in their order."""
    return tuple(
        pattern
        for part in ("normalizer", "pre_tokenizer")
        for pattern in _patterns(tokenizer, part)
        if pattern != _O200K and not _is_linear(pattern)
    )


def patterns_of_decoder(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Patterns by which it makes text of tokens; published ones have none."""
    return tuple(_patterns(tokenizer, "decoder"))


def _is_linear(pattern: str) -> bool:
    """Whether no part of a text is looked at more than a few times, as far as that is easily seen.

    Each alternative is a run of one kind: before it stand characters that are there or not, of
    which one may be missing, and behind it what cannot fail, so that it is never tried shorter.
    """
    place = 0
    while True:
        end = _end_of_alternative(pattern, place)
        if end is None:
            return False
        if end == len(pattern):
            return True
        place = end + 1


def _end_of_alternative(pattern: str, place: int) -> int | None:
    """Where a linear alternative ends, with the pattern or before ``|``; None if it is none."""
    for known in (_CONTRACTIONS, *(_SPACES if pattern.endswith(_LAST) else ())):
        end = place + len(known)
        if pattern.startswith(known, place) and pattern[end : end + 1] in ("", "|"):
            return end
    start, has_run, may_miss = place, False, False
    while place < len(pattern) and pattern[place] != "|":
        piece = _PIECE.match(pattern, place)
        if piece is None:
            return None
        often = piece["often"]
        cannot_fail = often in ("*", "?")
        if (has_run and not cannot_fail) or (often == "?" and may_miss and not has_run):
            return None
        may_miss |= often == "?"
        has_run |= often not in (None, "?")
        place = piece.end()
    return place if place > start else None


def _patterns(tokenizer: PreTrainedTokenizerBase, part: str) -> Iterator[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    found = getattr(backend, part, None)
    # The library states its parts as JSON by pickle's protocol; nothing is unpickled here.
    state = getattr(found, "__getstate__", lambda: None)()
    if isinstance(state, bytes):
        yield from _regexes(json.loads(state))


def _regexes(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "Regex" and isinstance(inner, str):
                yield inner
            else:
                yield from _regexes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _regexes(inner)


# Any of these means that the checkpoint brings a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
# What any prompt may have, and what none may without being asked for: see RequestLimits.
_FEWEST_CHARS, _MOST_CHARS = 2**16, 2**22


def load_tokenizer(
    model_path: str | Path,
    *,
    trust_remote_code: bool = False,
    config: PreTrainedConfig | None = None,
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a checkpoint folder; None when it brings none.

    Its chat template is that of the checkpoint's processor, where this has one.

    Args:
        trust_remote_code: whether the tokenizer may come with its own Python code.
        config: what was made of the folder's ``config.json``; None to have it made again.

    Raises:
        ValueError: the folder is not there, or its tokenizer cannot be loaded.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise ValueError(f"cannot load a tokenizer: {folder} is no folder")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        with PanicsAsErrors():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, config=config, trust_remote_code=trust_remote_code, local_files_only=True
            )
            # The first call settles how it cuts and pads. Later ones only read, and several
            # threads may make them at once.
            tokenizer("a")
    # The formats' parsers raise whatever they like, bare Exception included.
    except Exception as error:
        raise ValueError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if patterns := patterns_of_decoder(tokenizer):
        raise ValueError(
            f"the tokenizer in {folder} makes text of tokens by the pattern {patterns[0][:80]!r}, "
            "which need not end, and is not supported"
        )
    if not (trust_remote_code or encodes_as_the_library(tokenizer)):
        _refuse_patterns(folder, tokenizer)
    template = processor_chat_template(folder)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def encodes_as_the_library(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its class adds nothing to what the ``tokenizers`` library makes of a text."""
    return type(tokenizer)._encode_plus is PreTrainedTokenizerFast._encode_plus


def _refuse_patterns(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that is run in this process, where nothing can stop its patterns."""
    if patterns := doubtful_patterns(tokenizer):
        raise ValueError(
            f"the tokenizer in {folder} cuts text by the pattern {patterns[0][:80]!r}, which need "
            f"not end, and its class {type(tokenizer).__name__} cannot be run where it could be "
            "stopped; name PreTrainedTokenizerFast as the tokenizer_class, or, if the checkpoint "
            "is to be trusted, set engine.trust_remote_code"
        )


def max_prompt_chars(
    tokenizer: PreTrainedTokenizerBase | None, num_tokens: int, setting: int | None
) -> int:
    """How many characters a prompt may have; a tokenizer would read them all to count its tokens.

    Args:
        setting: what the user set; None derives it from the longest tokens that there are.
    """
    if setting is not None:
        return setting
    if tokenizer is None:
        return _MOST_CHARS
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return min(max(_FEWEST_CHARS, num_tokens * longest), _MOST_CHARS)


class PanicsAsErrors:
    """Hold while the ``tokenizers`` library runs what a checkpoint wrote.

    Its panics, such as that of a pattern that tries too often, are no ``Exception`` in Python, and
    would end a thread that serves others.

    Raises:
        ValueError: it panicked.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is not None and kind.__module__ == "pyo3_runtime":
            raise ValueError(f"the checkpoint's tokenizer cannot take this: {error}") from error


@contextmanager
def tokenizers_turn(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Hold while the tokenizer is called in a thread that may not be the only one.

    Its panics are raised as :class:`PanicsAsErrors` says. Tokenizers of the ``tokenizers`` library
    are called by any number of threads at once, once they are loaded by :func:`load_tokenizer`;
    others one by one.
    """
    if getattr(tokenizer, "is_fast", False):
        with PanicsAsErrors():
            yield
        return
    with turn_of(tokenizer):
        yield


def eos_token_ids(
    config: PreTrainedConfig | None,
    generation_config: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> frozenset[int]:
    """The ids that end a sequence; empty when nothing names one.

    The first source that names any is believed, as in transformers' ``generate``: the generation
    config (an instruction-tuned checkpoint lists the end of a turn there), the model config, a
    multi-modal config's text part, the tokenizer.
    """
    text_config = None if config is None else config.get_text_config()
    for source in (generation_config, config, text_config, tokenizer):
        named = getattr(source, "eos_token_id", None)
        if isinstance(named, int):
            return frozenset({named})
        if named:
            return frozenset(int(token_id) for token_id in named)
    return frozenset()


def token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool, seconds: float
) -> list[int]:
    """Tokenize a text.

    Where the tokenizer cuts it by patterns that are not known to be harmless, that happens in a
    process of its own, which can be stopped.

    Args:
        add_special_tokens: whether to add those that the tokenizer begins and ends a text with.
        seconds: of CPU time that such a process may take.

    Raises:
        ValueError: the tokenizer cannot take it, or took longer.
    """
    processes = _processes_of(tokenizer)
    if processes is not None:
        return processes.token_ids(text, add_special_tokens, seconds)
    with tokenizers_turn(tokenizer):
        # Not verbose: it would warn of what is too long, which the caller cuts or refuses.
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)[
            "input_ids"
        ]
    return ids


class _TokenizerProcesses(JobProcesses):
    """Tokenizes by one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, patterns: tuple[str, ...]) -> None:
        first = {
            "tokenizer": tokenizer.backend_tokenizer.to_str(),
            "splits_special_tokens": tokenizer.split_special_tokens,
        }
        super().__init__(json.dumps(first).encode() + b"\n")
        self._pattern = patterns[0][:80]

    def token_ids(self, text: str, adds_special: bool, seconds: float) -> list[int]:
        """See :func:`token_ids`."""
        job = {"text": text, "adds_special": adds_special, "seconds": seconds}
        answer = self.ask(json.dumps(job).encode() + b"\n", seconds)
        if isinstance(answer, dict) and "ids" in answer:
            ids: list[int] = answer["ids"]
            return ids
        if isinstance(answer, dict):
            raise ValueError(f"the checkpoint's tokenizer cannot take this: {answer['error']}")
        if answer == "seconds":
            raise ValueError(
                f"the checkpoint's tokenizer took more than {seconds:.3g} s of CPU time for "
                f"{len(text)} characters, which it cuts by patterns such as {self._pattern!r}; if "
                "it is to be trusted, raise engine.limits.tokenizer_seconds"
            )
        raise ValueError(
            f"the process of the checkpoint's tokenizer ended with status {answer} over "
            f"{len(text)} characters"
        )


_PROCESSES: WeakKeyDictionary[PreTrainedTokenizerBase, _TokenizerProcesses | None] = (
    WeakKeyDictionary()
)


def _processes_of(tokenizer: PreTrainedTokenizerBase) -> _TokenizerProcesses | None:
    """None for a tokenizer that is harmless.

    One whose class does more than the library is, or is trusted, as it was loaded.
    """
    if tokenizer not in _PROCESSES:
        may_be_sent = encodes_as_the_library(tokenizer)
        patterns = doubtful_patterns(tokenizer) if may_be_sent else ()
        made = _TokenizerProcesses(tokenizer, patterns) if patterns else None
        # Another thread may have been first; its processes are then the ones.
        _PROCESSES.setdefault(tokenizer, made)
    return _PROCESSES[tokenizer]
