"""Sources of requests: the lines of a file, or conversations that are made up."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from engine.interface.settings import explain_validation_error
from omni.commands.bench.measured_request import LoadTarget, Send
from omni.requests.json_lines import read_json_lines
from omni.requests.request_line import RequestLine

__all__ = [
    "LoadSource",
    "LoadTurns",
    "MadeUpForm",
    "MadeUpShape",
    "MadeUpSource",
    "RequestLines",
    "TokenLengths",
    "line_source",
    "made_up_text",
    "parse_line",
]

LoadTurns: TypeAlias = Generator[Send, str | None, None]
"""Yields requests, and is sent the answer to each before it yields the next."""

LoadSource: TypeAlias = Callable[[int, int], LoadTurns]
"""Begins a conversation, given the level's index (-1 to warm up) and a number from 0 on."""

MadeUpForm: TypeAlias = Literal["chat", "completions", "text"]

_STANDARD_INPUT = "-"
_TEXT = """
about above across again air animal answer around back because before began below book both bring
car carry change city close country cut day different door earth eat enough evening example eye
family father find first follow food form friend garden girl give good green group hand hard have
head hear help high home house idea important island keep kind know land large last learn leave
letter life light line list little long look make many mean might money more most mother mountain
much music must name near need never new next night number often old once open other over page
paper part people picture place plant play point read really right river road room run same say
school sea second see sentence set ship short show side small some song soon sound spell stand
start state still stop story street study such summer table take talk tell than that there thing
think time together took town tree try turn under until use very wait walk want warm watch water
way week well went what where which white whole why will wind window winter with without word work
world would write year young
"""
_WORDS = _TEXT.split()


class RequestLines:
    """The lines of a file of requests.

    Args:
        path: of the file; ``-`` is the standard input.

    Raises:
        ValueError: it cannot be read, or has no request in it.
    """

    def __init__(self, path: Path) -> None:
        is_standard_input = os.fspath(path) == _STANDARD_INPUT
        self._name = "standard input" if is_standard_input else os.fspath(path)
        self._folder = Path() if is_standard_input else path.parent
        try:
            with nullcontext(sys.stdin.buffer) if is_standard_input else open(path, "rb") as file:
                self._lines = [*read_json_lines(file)]
        except OSError as error:
            raise ValueError(f"--input: {self._name}: cannot be read: {error.strerror}") from error
        if not self._lines:
            raise ValueError(f"--input: {self._name}: no request in it")

    def __len__(self) -> int:
        return len(self._lines)

    def prepared(self, target: LoadTarget) -> list[Send]:
        """Make requests of all lines.

        Raises:
            ValueError: lines are wrong or cannot be sent to the target; names all of them.
        """
        sends, wrong = [], []
        for line in self._lines:
            try:
                if line.error is not None:
                    raise ValueError(line.error)
                sends.append(target.prepare(line.data, self._folder))
            except (ValueError, RecursionError) as error:
                wrong.append(f"{self._name}:{line.number}: {error}")
        if wrong:
            raise ValueError("\n".join(wrong))
        return sends


def parse_line(data: Mapping[str, Any]) -> RequestLine:
    """Check a line of ``requests.jsonl``; ``ValueError`` says what is wrong with it."""
    try:
        return RequestLine.model_validate_json(json.dumps(dict(data)), strict=True)
    except ValidationError as error:
        explained = explain_validation_error(error, RequestLine, dict(data))
        raise ValueError(explained.replace("\n", "; ")) from error


def line_source(sends: Sequence[Send]) -> LoadSource:
    """Repeat requests in their order, each of them a conversation by itself."""

    def conversation(level: int, number: int) -> LoadTurns:
        yield sends[number % len(sends)]

    return conversation


@dataclass(frozen=True, slots=True)
class MadeUpShape:
    """The shape of requests that are made up.

    Attributes:
        form: chat messages, a text to complete, or a text for a model that samples nothing.
        prompt_tokens: of the first prompt of a conversation, approximately.
        shared_prefix_tokens: those of them that it shares with others, approximately.
        num_prefixes: how many such prefixes there are, used in turns.
        num_turns: of a conversation: each turn repeats all before it, the answers included, and
            adds as many words as the first turn has beside its prefix.
        sampling: fields of the stage that answers.
        seed: of the words.
    """

    form: MadeUpForm = "chat"
    prompt_tokens: int = 128
    shared_prefix_tokens: int = 0
    num_prefixes: int = 1
    num_turns: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shared_prefix_tokens >= self.prompt_tokens:
            raise ValueError(
                f"--shared-prefix-tokens ({self.shared_prefix_tokens}) must be fewer than "
                f"--prompt-tokens ({self.prompt_tokens}): each request has words of its own too"
            )


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """How many tokens the words of made-up texts take in a target's tokenizer.

    Attributes:
        per_word: tokens of a word.
        around: tokens of a prompt of no words, such as those of a chat template.
    """

    per_word: float = 1.0
    around: float = 0.0

    @classmethod
    def measured(cls, shorter: tuple[int, int], longer: tuple[int, int]) -> TokenLengths:
        """Compute them from two prompts, each given as its words and its tokens.

        Raises:
            ValueError: the longer one does not have more tokens.
        """
        (fewer_words, fewer_tokens), (more_words, more_tokens) = shorter, longer
        if more_tokens <= fewer_tokens:
            raise ValueError(
                f"{more_words} words are said to be {more_tokens} tokens, no more than "
                f"{fewer_words} words, {fewer_tokens}: prompts of a length cannot be made up"
            )
        per_word = (more_tokens - fewer_tokens) / (more_words - fewer_words)
        return cls(per_word, max(0.0, fewer_tokens - per_word * fewer_words))

    def num_words(self, num_tokens: float) -> int:
        """Words of about so many tokens: at least one, but none for no tokens."""
        return max(1, round(num_tokens / self.per_word)) if num_tokens else 0


class MadeUpSource:
    """Makes conversations up, different ones for every level, so that none hits another's cache.

    Args:
        target: that they are for.
        shape: of the conversations.
        lengths: of words in the target's tokens.
    """

    def __init__(
        self, target: LoadTarget, shape: MadeUpShape, lengths: TokenLengths | None = None
    ) -> None:
        lengths = lengths or TokenLengths()
        self._target = target
        self._shape = shape
        self._prefix_words = lengths.num_words(shape.shared_prefix_tokens)
        all_words = lengths.num_words(shape.prompt_tokens - lengths.around)
        self._own_words = max(1, all_words - self._prefix_words)

    def conversation(self, level: int, number: int) -> LoadTurns:
        """A conversation; every ``num_prefixes``-th one of a level has the same prefix."""
        shape = self._shape
        prefix = made_up_text(
            self._prefix_words, shape.seed, level, "prefix", number % shape.num_prefixes
        )
        messages: list[dict[str, str]] = []
        text = ""
        for turn in range(shape.num_turns):
            said = made_up_text(self._own_words, shape.seed, level, number, turn)
            if prefix and not turn:
                said = f"{prefix} {said}"
            messages.append({"role": "user", "content": said})
            text += f" {said}" if turn else said
            prompt = list(messages) if shape.form == "chat" else text
            answer = (yield self._prepare(prompt, shape.sampling)) or ""
            messages.append({"role": "assistant", "content": answer})
            text += answer

    def probe(self, num_words: int) -> Send:
        """A request of so many words with an answer of one token, whose prompt is measured."""
        text = made_up_text(num_words, self._shape.seed, "probe", num_words)
        sampling = {**self._shape.sampling, "max_tokens": 1}
        is_chat = self._shape.form == "chat"
        return self._prepare(
            [{"role": "user", "content": text}] if is_chat else text,
            sampling if self._shape.form != "text" else {},
        )

    def _prepare(self, prompt: object, sampling: Mapping[str, Any]) -> Send:
        line: dict[str, Any] = {"prompt": prompt}
        if sampling:
            stage = self._target.answering_stage
            line["sampling"] = sampling if stage is None else {stage: sampling}
        return self._target.prepare(line, Path())


def made_up_text(num_words: int, *seeds: object) -> str:
    """A text of common words, which depends on the seeds alone."""
    return " ".join(random.Random(" ".join(map(str, seeds))).choices(_WORDS, k=num_words))
