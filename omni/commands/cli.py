"""The command line: run, validate, explain, verify and show pipelines.

Each command imports what it needs when it runs, so that help and mistakes in the arguments do not
wait for torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from omni.commands.prompt_flags import PromptFlags
    from omni.pipelines.pipeline_config import PipelineConfig
    from omni.requests.request import OmniRequest
    from omni.requests.request_file import RequestError

__all__ = ["app"]

BAD_INPUT = 2
"""Exit status of what cannot be run as asked; 1 is that of requests that failed or differed."""

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
Prompts: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        "-p",
        metavar="TEXT",
        help="A prompt, taken as it stands, placeholders included; may be given several times.",
    ),
]
Chats: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--chat",
        metavar="TEXT",
        help="What a user says, in the checkpoint's chat template, after every --image and "
        "--audio; needs no placeholders. Each of several is a conversation of its own.",
    ),
]
Audio: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--audio",
        metavar="FILE",
        help="A WAV file that every --chat begins with, after its images, or that every --prompt "
        "shows where its next placeholder is; without either, a request to a speech model. May "
        "be given several times.",
    ),
]
Language: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="CODE",
        help="The language spoken in every --audio: en, fr, ...; the model finds out if it is "
        "left out.",
    ),
]
EncoderPrompts: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--encoder-prompt",
        metavar="TEXT",
        help="Text for an encoder; may be given several times.",
    ),
]
DecoderPromptText: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--decoder-prompt",
        metavar="TEXT",
        help="What the decoder goes on from, beside every --audio or --encoder-prompt.",
    ),
]
Images: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="An image that every --chat begins with, or that every --prompt shows where its next "
        "placeholder is; may be given several times.",
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
Quiet: TypeAlias = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")
]
Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command()
def run(
    config: Config,
    prompt: Prompts = None,
    chat: Chats = None,
    audio: Audio = None,
    language: Language = None,
    encoder_prompt: EncoderPrompts = None,
    decoder_prompt: DecoderPromptText = None,
    image: Images = None,
    input_file: Input = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            "-o",
            metavar="DIR",
            help="Write outputs.jsonl, tensors and sounds here instead of printing the texts.",
        ),
    ] = None,
    speaker: Speaker = None,
    overrides: Overrides = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run requests through a pipeline. Exit status 1 if any of them failed."""
    with _plain_errors(debug):
        from omni.commands.prompt_flags import PromptFlags
        from omni.commands.run_command import run_requests

        pipeline = _load(config, overrides, speaker)
        flags = PromptFlags(prompt, chat, audio, language, encoder_prompt, decoder_prompt, image)
        requests = _requests(pipeline, flags, input_file)
        all_well = run_requests(pipeline, requests, output_dir=output_dir, quiet=quiet)
    if not all_well:
        raise typer.Exit(1)


@app.command()
def validate(
    config: Config,
    input_file: Input = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Check a pipeline's YAML file, and a file of requests, without loading any model."""
    with _plain_errors(debug):
        pipeline = _load(config, overrides)
        typer.echo(f"{config}: valid; stages: {', '.join(pipeline.topological_order())}")
        if input_file is not None:
            requests = _read_file(pipeline, input_file)
            _refuse_bad_lines(requests)
            typer.echo(f"{input_file}: valid; requests: {len(requests)}")


@app.command()
def explain(
    config: Config,
    load: Annotated[
        bool,
        typer.Option(
            "--load/--no-load",
            help="Load the models, to tell what each stage reserves; they must be here, or on "
            "a hub that can be reached.",
        ),
    ] = True,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Show a pipeline's graph, every setting with its default, and what memory it reserves."""
    with _plain_errors(debug):
        from omni.commands.explanation import describe_config, describe_memory, draw_graph

        pipeline = _load(config, overrides)
        typer.echo(f"{draw_graph(pipeline)}\n\n{describe_config(pipeline)}")
        if load:  # which takes a while, and fails without the models
            typer.echo(f"\n{describe_memory(pipeline)}")


@app.command()
def verify(
    config: Config,
    prompt: Prompts = None,
    chat: Chats = None,
    audio: Audio = None,
    language: Language = None,
    encoder_prompt: EncoderPrompts = None,
    decoder_prompt: DecoderPromptText = None,
    image: Images = None,
    input_file: Input = None,
    atol: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="How far tensor elements may be apart (in proportion in rows that exceed 1), "
            "instead of measuring what rounding does.",
        ),
    ] = None,
    speaker: Speaker = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Run your own requests with and without caches, and compare.

    Exit status 1 if anything differed or a request failed.
    """
    with _plain_errors(debug):
        from omni.commands.prompt_flags import PromptFlags
        from omni.runtime.omni import Omni
        from omni.verification.verify import verify as verify_requests

        pipeline = _load(config, overrides, speaker)
        flags = PromptFlags(prompt, chat, audio, language, encoder_prompt, decoder_prompt, image)
        requests = _refuse_bad_lines(_requests(pipeline, flags, input_file))
        with Omni(pipeline) as omni:
            report = verify_requests(omni, requests, atol=atol)
        typer.echo("\n".join(report.lines()))
    if report.failures or not report.equal:
        raise typer.Exit(1)


@app.command()
def demo(debug: Debug = False) -> None:
    """Run two_step on prompts with shared prefixes, and show what its caches save."""
    with _plain_errors(debug):
        from omni.commands.demo import run_demo

        all_well = run_demo()
    if not all_well:
        raise typer.Exit(1)


@contextmanager
def _plain_errors(debug: bool) -> Iterator[None]:
    """Tell a user's mistake in a line, without a traceback, unless it is asked for."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read the output has seen enough; click ends quietly
    except (ValueError, OSError) as error:
        if debug:
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error


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

    sampling = {
        name: stage.sampling if stage.kind == "autoregressive" else None
        for name, stage in pipeline.stages.items()
    }
    return read_requests(input_file, sampling)


def _refuse_bad_lines(requests: list[OmniRequest | RequestError]) -> list[OmniRequest]:
    from omni.requests.request import OmniRequest

    good = [request for request in requests if isinstance(request, OmniRequest)]
    bad = [request.message for request in requests if not isinstance(request, OmniRequest)]
    if bad:
        raise ValueError("\n".join(bad))
    return good
