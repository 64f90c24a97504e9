"""What ``omni bench`` sends, where and how much of it, as its flags say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

_ENDLESS = 10**9
_USUAL_REQUESTS, _USUAL_PROMPT_TOKENS, _USUAL_MAX_TOKENS = 32, 128, 64


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchFlags:
    """Flags on a server, on requests that are made up, and on how much load there is."""

    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure this server, ours or another with OpenAI's API, instead of a pipeline "
            "in this process.",
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the server; else its only one.")
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="That the server wants; better in $OMNI_API_KEY."),
    ] = None
    speech: Annotated[
        bool, typer.Option("--speech", help="Let the server's chats be answered by sound as well.")
    ] = False
    voice: Annotated[str | None, typer.Option(metavar="NAME", help="Whose, with --speech.")] = None
    endpoint: Annotated[
        Literal["chat", "completions", "speech", "embeddings", "transcriptions", "realtime"] | None,
        typer.Option(
            metavar="NAME",
            help="Ask by chat messages, as is done if left out, or for completions, for models "
            "without a chat template; with --url also for speech, embeddings, transcriptions (of "
            "--input) and realtime answers.",
        ),
    ] = None
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of each prompt, about; else 128.")
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of each answer at most; else 64.")
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Let every answer have all of --max-tokens.")
    ] = False
    temperature: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="0 is greedy; else the model's.")
    ] = None
    shared_prefix_tokens: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Of each prompt, that it shares with others, about."),
    ] = 0
    prefixes: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many such beginnings there are.")
    ] = 1
    turns: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Requests of one conversation, each with all before it."
        ),
    ] = 1
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,4", help="So many requests at once, one level after the other; else 1."
        ),
    ] = None
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="0.5,1,2",
            help="Instead: so many a second arrive, by chance (Poisson), whether or not others "
            "are answered.",
        ),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Of each level; else 32, or as many as the file has, or with --duration all that "
            "fit.",
        ),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="SECONDS", help="After which a level sends no more."),
    ] = None
    warmup: Annotated[
        int, typer.Option(min=0, metavar="N", help="Requests before, which are not counted.")
    ] = 4
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Of one request.")
    ] = 600.0
    seed: Annotated[int, typer.Option(help="Of words and arrivals.")] = 0

    @property
    def is_text(self) -> bool:
        """True if a text is asked for: by chat messages, or for completions."""
        return self.endpoint in (None, "chat", "completions")

    @property
    def made_up_tokens(self) -> int:
        """Tokens of each prompt that is made up, about."""
        return self.prompt_tokens or _USUAL_PROMPT_TOKENS

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of the stage that answers a request that is made up."""
        if not self.is_text:
            return {}
        fields: dict[str, Any] = {"max_tokens": self.max_tokens or _USUAL_MAX_TOKENS}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return fields | ({} if self.temperature is None else {"temperature": self.temperature})

    def num_conversations(self, num_lines: int | None = None) -> int:
        """Conversations of each level at most, given the lines of ``--input``, if it was given."""
        requests = self.requests
        if requests is None:
            if self.duration is not None:
                return _ENDLESS
            requests = _USUAL_REQUESTS if num_lines is None else num_lines
        return math.ceil(requests / self.turns)
