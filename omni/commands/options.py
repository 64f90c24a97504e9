"""What the commands take, as their help tells it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import typer

from omni.commands.command import CommandOptions
from omni.commands.prompt_flags import PromptFlags

__all__ = [
    "DemoOptions",
    "ExplainOptions",
    "ListOptions",
    "RunOptions",
    "RuntimeFlags",
    "SamplingFlags",
    "ValidateOptions",
    "VerifyOptions",
    "complete_config",
]


def complete_config(incomplete: str) -> list[str]:
    """Names of shipped pipelines, for the shell; it offers files by itself."""
    from omni.pipelines.config_file import shipped_configs

    return [name for name in shipped_configs() if name.startswith(incomplete)]


def _complete_runtime(incomplete: str) -> list[str]:
    from stages.placement import RuntimeKind  # only here: help need not wait for all stages

    return [kind for kind in get_args(RuntimeKind) if kind.startswith(incomplete)]


Config: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A pipeline's YAML file, or the name of a shipped one: two_step.",
        autocompletion=complete_config,
    ),
]
Input: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--input",
        "-i",
        metavar="FILE",
        help="Requests, one JSON object a line; - is the standard input.",
    ),
]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PLACE=VALUE",
        help="Replace a value: stages.writer.engine.num_blocks=64. May be given several times.",
    ),
]
SpeakerName: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Whose voice speaks, where a request does not say."),
]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SamplingFlags:
    """Flags that change how every stage samples that does; a request's own word counts more."""

    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens to generate at most, in every stage that samples, where a request does "
            "not say.",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="Of every stage that samples, where a request does not say; 0 is greedy.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RuntimeFlags:
    """Flags that say where the stages run, in the place of what the pipeline's file says."""

    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            autocompletion=_complete_runtime,
            help="Where the stages run: inline, in this process; processes, each in processes of "
            "its own; ray, in a Ray cluster.",
        ),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Of the Ray cluster to join; without it one that runs here, or a new one.",
        ),
    ] = None

    @property
    def runtime_overrides(self) -> dict[str, str]:
        """What the flags change, by its place."""
        given = {"runtime.kind": self.runtime, "runtime.address": self.address}
        return {place: value for place, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunOptions(PromptFlags, SamplingFlags, RuntimeFlags, CommandOptions):
    """Of ``omni run``."""

    config: Config
    input_file: Input = None
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            "-o",
            metavar="DIR",
            help="Write outputs.jsonl, tensors and sounds here; texts are printed as well.",
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with a run into --output-dir that was cut short, if there is."
        ),
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the outputs that --output-dir has.")
    ] = False
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a timeline of every request, which Perfetto (ui.perfetto.dev) and "
            "chrome://tracing show.",
        ),
    ] = None
    speaker: SpeakerName = None
    overrides: Overrides = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DemoOptions(CommandOptions):
    """Of ``omni demo``."""

    output_dir: Annotated[
        Path,
        typer.Option(
            "--output-dir", "-o", metavar="DIR", help="Write the answers here, as WAV files."
        ),
    ] = Path("answers")
    random: Annotated[
        bool,
        typer.Option(
            "--random",
            help="Show pipelines of random models instead: nothing makes sense, all is exact.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ValidateOptions(RuntimeFlags, CommandOptions):
    """Of ``omni validate``."""

    config: Config
    input_file: Input = None
    overrides: Overrides = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExplainOptions(RuntimeFlags, CommandOptions):
    """Of ``omni explain``."""

    config: Config
    load: Annotated[
        bool,
        typer.Option(
            "--load/--no-load",
            help="Load the models, to tell what each stage reserves; they must be here, or on "
            "a hub that can be reached.",
        ),
    ] = True
    overrides: Overrides = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerifyOptions(PromptFlags, SamplingFlags, RuntimeFlags, CommandOptions):
    """Of ``omni verify``."""

    config: Config
    input_file: Input = None
    atol: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="How far tensor elements may be apart (in proportion in rows that exceed 1), "
            "instead of measuring what rounding does.",
        ),
    ] = None
    speaker: SpeakerName = None
    overrides: Overrides = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ListOptions(CommandOptions):
    """Of ``omni list``."""

    what: Annotated[
        Literal["pipelines", "models", "architectures", "transforms", "kinds"] | None,
        typer.Argument(
            metavar="[WHAT]",
            help="pipelines, models, architectures, transforms or kinds; all of them if left out.",
        ),
    ] = None
