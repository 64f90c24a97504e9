"""Requests that are made up: of a length, with beginnings that they share, and in turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from omni.commands.bench.load_source import LoadConversation, LoadTarget, Send
from omni.commands.bench.made_up_words import TokenLengths, made_up_text

__all__ = ["MadeUpForm", "MadeUpShape", "MadeUpSource"]

MadeUpForm: TypeAlias = Literal["chat", "completions", "text"]


@dataclass(frozen=True, slots=True)
class MadeUpShape:
    """What requests are to be like that are made up.

    Attributes:
        form: chat messages, or plain text; ``text`` is one of which nothing is sampled.
        prompt_tokens: of the first prompt of a conversation, about.
        shared_prefix_tokens: of these, how many at its beginning it shares with others, about.
        num_prefixes: how many such beginnings there are, in turns.
        num_turns: of a conversation: each but the first says what was said before, the answers
            included, and then as much again as the first one does beside its shared beginning.
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


class MadeUpSource:
    """Makes conversations up, other ones for every level, so that none hits what an earlier left.

    Args:
        target: what they are for.
        shape: what they are to be like.
        lengths: how many tokens words take there; None: one each.
    """

    def __init__(
        self, target: LoadTarget, shape: MadeUpShape, lengths: TokenLengths | None = None
    ) -> None:
        lengths = lengths or TokenLengths()
        self._target = target
        self._shape = shape
        self._prefix_words = lengths.num_words(shape.shared_prefix_tokens)
        whole = lengths.num_words(shape.prompt_tokens, around=True)
        self._own_words = max(1, whole - self._prefix_words)

    def conversation(self, level: int, number: int) -> LoadConversation:
        """Conversation ``number``, which has the beginning ``number`` modulo how many there are."""
        seed = self._shape.seed
        prefix = made_up_text(
            self._prefix_words, seed, level, "prefix", number % self._shape.num_prefixes
        )
        own = [
            made_up_text(self._own_words, seed, level, number, turn)
            for turn in range(self._shape.num_turns)
        ]
        if prefix:
            own[0] = f"{prefix} {own[0]}"
        return _MadeUp(self._target, self._shape, own)

    def probe(self, num_words: int) -> Send:
        """A request of so many words with an answer of one token, to see how long it is."""
        text = made_up_text(num_words, self._shape.seed, "probe", num_words)
        sampling = {**self._shape.sampling, "max_tokens": 1}
        sampling.pop("min_tokens", None)
        prompt: object = text
        if self._shape.form == "chat":
            prompt = [{"role": "user", "content": text}]
        return _prepared(self._target, prompt, sampling if self._shape.form != "text" else {})


class _MadeUp:
    """A conversation; see :class:`~omni.commands.bench.load_source.LoadConversation`."""

    def __init__(self, target: LoadTarget, shape: MadeUpShape, turns: list[str]) -> None:
        self._target = target
        self._shape = shape
        self._left = turns
        self._messages: list[dict[str, str]] = []
        self._text = ""

    def next(self, answer: str | None) -> Send | None:
        if not self._left:
            return None
        said = self._left.pop(0)
        if self._shape.form == "chat":
            if answer is not None:
                self._messages.append({"role": "assistant", "content": answer})
            self._messages.append({"role": "user", "content": said})
            return _prepared(self._target, list(self._messages), self._shape.sampling)
        self._text += said if answer is None else f"{answer} {said}"
        return _prepared(self._target, self._text, self._shape.sampling)


def _prepared(target: LoadTarget, prompt: object, sampling: Mapping[str, Any]) -> Send:
    stage = target.answering_stage
    if not sampling:
        return target.prepare({"prompt": prompt}, Path())
    line = {"prompt": prompt, "sampling": {stage: sampling} if stage is not None else sampling}
    return target.prepare(line, Path())
