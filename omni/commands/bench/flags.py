"""Flags of ``omni bench``: the target, the requests and the load."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from omni.commands.command import option

_UNLIMITED = 10**9
_DEFAULT_REQUESTS, _DEFAULT_PROMPT_TOKENS, _DEFAULT_MAX_TOKENS = 32, 128, 64


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchFlags:
    """Flags for the server, for synthetic requests, and for the load."""

    url: str | None = option(
        "Measure this server, ours or another with OpenAI's API, instead of a pipeline in this "
        "process.",
        metavar="URL",
    )
    model: str | None = option("Model of the server; by default its only one.", metavar="NAME")
    api_key: str | None = option("Key of the server; better set $OMNI_API_KEY.", metavar="KEY")
    speech: bool = option("Request spoken answers as well, with --url.", "--speech", default=False)
    voice: str | None = option(
        "Voice of the answers, with --speech or --endpoint speech.", metavar="NAME"
    )
    endpoint: (
        Literal["chat", "completions", "speech", "embeddings", "transcriptions", "realtime"] | None
    ) = option(
        "chat (by default), or completions for models without a chat template; with --url also "
        "speech, embeddings, transcriptions (of --input) and realtime.",
        metavar="NAME",
    )
    prompt_tokens: int | None = option(
        "Approximate prompt length; default 128.", min=1, metavar="N"
    )
    max_tokens: int | None = option("Maximum tokens per answer; default 64.", min=1, metavar="N")
    ignore_eos: bool = option(
        "Generate all --max-tokens of every answer.", "--ignore-eos", default=False
    )
    temperature: float | None = option("0 is greedy; by default the model's.", metavar="NUMBER")
    shared_prefix_tokens: int = option(
        "Approximate tokens of each prompt that others share.", default=0, min=0, metavar="N"
    )
    prefixes: int = option("Number of different shared prefixes.", default=1, min=1, metavar="N")
    turns: int = option(
        "Requests per conversation, each with all earlier turns.", default=1, min=1, metavar="N"
    )
    concurrency: str | None = option(
        "Concurrent requests of each level, in order; by default 1.", metavar="1,2,4"
    )
    rate: str | None = option(
        "Instead: mean arrivals per second of each level (Poisson), independent of answers.",
        metavar="0.5,1,2",
    )
    requests: int | None = option(
        "Of each level; by default 32, or all of --input, or with --duration as many as fit.",
        min=1,
        metavar="N",
    )
    duration: float | None = option(
        "Time after which a level sends no more requests.", min=0.001, metavar="SECONDS"
    )
    warmup: int = option("Warm-up requests, which are not counted.", default=4, min=0, metavar="N")
    timeout: float = option("Timeout of one request.", default=600.0, min=0.001, metavar="SECONDS")
    seed: int = option("Seed of words and arrivals.", default=0)

    @property
    def is_text(self) -> bool:
        """True if the endpoint answers with text: chat or completions."""
        return self.endpoint in (None, "chat", "completions")

    @property
    def synthetic_tokens(self) -> int:
        """Approximate number of tokens of each synthetic prompt."""
        return self.prompt_tokens or _DEFAULT_PROMPT_TOKENS

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling fields of synthetic requests, for the stage that answers."""
        if not self.is_text:
            return {}
        fields: dict[str, Any] = {"max_tokens": self.max_tokens or _DEFAULT_MAX_TOKENS}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return fields | ({} if self.temperature is None else {"temperature": self.temperature})

    def num_conversations(self, num_lines: int | None = None) -> int:
        """Return the maximum conversations per level; ``num_lines`` is that of ``--input``."""
        requests = self.requests
        if requests is None:
            if self.duration is not None:
                return _UNLIMITED
            requests = _DEFAULT_REQUESTS if num_lines is None else num_lines
        return math.ceil(requests / self.turns)
