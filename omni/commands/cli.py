"""The command line: run, validate, explain, verify and show pipelines.

Each command imports what it needs when it runs, so that help and mistakes in the arguments do not
wait for torch.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from omni.commands.command import CommandOptions, command
from omni.commands.prompt_flags import PromptFlags

if TYPE_CHECKING:
    from omni.pipelines.pipeline_config import PipelineConfig
    from omni.requests.request import OmniRequest
    from omni.requests.request_file import RequestError

__all__ = ["app"]

app = typer.Typer(
    help="Multi-stage model pipelines with prefix caching that never changes what comes out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Config: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="A pipeline's YAML file, or the name of a shipped one: two_step."
    ),
]
Input: TypeAlias = Annotated[
    Path | None,
    typer.Option("--input", "-i", metavar="FILE", help="Requests, one JSON object a line."),
]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PLACE=VALUE",
        help="Replace a value: stages.writer.engine.num_blocks=64. May be given several times.",
    ),
]
Speaker: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Whose voice speaks, where a request does not say."),
]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class _RunOptions(PromptFlags, CommandOptions):
    config: Config
    input_file: Input = None
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            "-o",
            metavar="DIR",
            help="Write outputs.jsonl, tensors and sounds here instead of printing the texts.",
        ),
    ] = None
    speaker: Speaker = None
    overrides: Overrides = None
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")
    ] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class _ValidateOptions(CommandOptions):
    config: Config
    input_file: Input = None
    overrides: Overrides = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class _ExplainOptions(CommandOptions):
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
class _VerifyOptions(PromptFlags, CommandOptions):
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
    speaker: Speaker = None
    overrides: Overrides = None


@command(app, _RunOptions)
def run(options: _RunOptions) -> bool:
    """Run requests through a pipeline. Exit status 1 if any of them failed."""
    from omni.commands.run_command import run_requests

    pipeline = _load(options.config, options.overrides, options.speaker)
    requests = _requests(pipeline, options, options.input_file)
    return run_requests(pipeline, requests, output_dir=options.output_dir, quiet=options.quiet)


@command(app, _ValidateOptions)
def validate(options: _ValidateOptions) -> bool:
    """Check a pipeline's YAML file, and a file of requests, without loading any model."""
    pipeline = _load(options.config, options.overrides)
    typer.echo(f"{options.config}: valid; stages: {', '.join(pipeline.topological_order())}")
    if options.input_file is not None:
        requests = _read_file(pipeline, options.input_file)
        _refuse_bad_lines(requests)
        typer.echo(f"{options.input_file}: valid; requests: {len(requests)}")
    return True


@command(app, _ExplainOptions)
def explain(options: _ExplainOptions) -> bool:
    """Show a pipeline's graph, every setting with its default, and what memory it reserves."""
    from omni.commands.explanation import describe_config, describe_memory, draw_graph

    pipeline = _load(options.config, options.overrides)
    typer.echo(f"{draw_graph(pipeline)}\n\n{describe_config(pipeline)}")
    if options.load:  # which takes a while, and fails without the models
        typer.echo(f"\n{describe_memory(pipeline)}")
    return True


@command(app, _VerifyOptions)
def verify(options: _VerifyOptions) -> bool:
    """Run your own requests with and without caches, and compare.

    Exit status 1 if anything differed or a request failed.
    """
    from omni.runtime.omni import Omni
    from omni.verification.verify import verify as verify_requests

    pipeline = _load(options.config, options.overrides, options.speaker)
    requests = _refuse_bad_lines(_requests(pipeline, options, options.input_file))
    with Omni(pipeline) as omni:
        report = verify_requests(omni, requests, atol=options.atol)
    typer.echo("\n".join(report.lines()))
    return report.equal and not report.failures


@command(app, CommandOptions)
def demo(_: CommandOptions) -> bool:
    """Run two_step on prompts with shared prefixes, and show what its caches save."""
    from omni.commands.demo import run_demo

    return run_demo()


def _load(config: str, overrides: list[str] | None, speaker: str | None = None) -> PipelineConfig:
    from omni.pipelines.config_file import parse_overrides
    from omni.pipelines.pipeline_config import PipelineConfig

    # A console script does not find the user's own modules, which transforms may be in. Last in
    # the path, so that a folder of theirs cannot hide a package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    replaced = parse_overrides(overrides or [])
    if speaker is not None:
        replaced["speaker"] = speaker
    return PipelineConfig.load(config, replaced)


def _requests(
    pipeline: PipelineConfig, flags: PromptFlags, input_file: Path | None
) -> list[OmniRequest | RequestError]:
    if flags.given == (input_file is not None):
        raise ValueError(
            "give either --chat, --prompt, --audio or --encoder-prompt, once or several times, or "
            "--input"
        )
    if input_file is not None:
        return _read_file(pipeline, input_file)
    return [*flags.requests()]


def _read_file(pipeline: PipelineConfig, input_file: Path) -> list[OmniRequest | RequestError]:
    from omni.requests.request_file import read_requests

    sampling = {name: stage.own_sampling for name, stage in pipeline.stages.items()}
    return read_requests(input_file, sampling)


def _refuse_bad_lines(requests: list[OmniRequest | RequestError]) -> list[OmniRequest]:
    from omni.requests.request import OmniRequest

    good = [request for request in requests if isinstance(request, OmniRequest)]
    bad = [request.message for request in requests if not isinstance(request, OmniRequest)]
    if bad:
        raise ValueError("\n".join(bad))
    return good
