"""What ``omni bench`` takes, as its help tells it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from omni.commands.command import CommandOptions
from omni.commands.options import Input, Overrides, RuntimeFlags, complete_config

__all__ = ["BenchOptions", "LoadFlags", "MadeUpFlags", "UrlFlags"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class UrlFlags:
    """Flags that go together with ``--url``."""

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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MadeUpFlags:
    """Flags for requests that are made up; a file's lines say all of this themselves."""

    endpoint: Annotated[
        Literal["chat", "completions", "speech", "embeddings", "transcriptions", "realtime"] | None,
        typer.Option(
            show_default=False,
            metavar="NAME",
            help="Ask by chat messages, as is done if left out, or for completions, for models "
            "without a chat template; with --url also for speech, embeddings, transcriptions (of "
            "--input) and realtime answers.",
        ),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, metavar="N", help="Of each prompt, about; else 128."
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, metavar="N", help="Of each answer at most; else 64."
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Let every answer have all of --max-tokens."),
    ] = False
    temperature: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", show_default=False, help="0 is greedy; else the model's."),
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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LoadFlags:
    """Flags on how much load there is, and for how long."""

    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,4",
            show_default=False,
            help="So many requests at once, one level after the other; else 1.",
        ),
    ] = None
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="0.5,1,2",
            show_default=False,
            help="Instead: so many a second arrive, by chance (Poisson), whether or not others "
            "are answered.",
        ),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default=False,
            help="Of each level; else 32, or as many as the file has, or with --duration all that "
            "fit.",
        ),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="SECONDS",
            show_default=False,
            help="After which a level sends no more.",
        ),
    ] = None
    warmup: Annotated[
        int, typer.Option(min=0, metavar="N", help="Requests before, which are not counted.")
    ] = 4
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Of one request.")
    ] = 600.0
    seed: Annotated[int, typer.Option(help="Of words and arrivals.")] = 0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchOptions(LoadFlags, MadeUpFlags, UrlFlags, RuntimeFlags, CommandOptions):
    """Of ``omni bench``."""

    config: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="A pipeline's YAML file, or the name of a shipped one, to run in this process.",
            autocompletion=complete_config,
        ),
    ] = None
    input_file: Input = None
    goodput: Annotated[
        str | None,
        typer.Option(
            metavar="MEASURE=NUMBER,...",
            help="Count the requests that keep limits: seconds for first_token, between_tokens, "
            "per_token, first_audio, end_to_end; a factor for real_time_factor.",
        ),
    ] = None
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", "-o", metavar="FILE", help="Write all figures here, for other programs."
        ),
    ] = None
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw them over the load.")
    ] = None
    overrides: Overrides = None
