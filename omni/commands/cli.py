"""The command line: run, validate, explain, verify and show pipelines.

Each command imports its dependencies when it runs, so that help and argument errors do not wait
for torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omni.commands.command import CommandOptions, Stopped, command
from omni.commands.options import (
    BenchOptions,
    ConvertOptions,
    DemoOptions,
    ExplainOptions,
    ListOptions,
    PromptFlags,
    RunOptions,
    RuntimeFlags,
    ValidateOptions,
    VerifyOptions,
)
from omni.commands.serve_command import ServeOptions, serve_pipelines

if TYPE_CHECKING:
    from omni.pipelines.pipeline_config import PipelineConfig
    from omni.requests.output_writer import OutputWriter
    from omni.requests.request import OmniRequest
    from omni.requests.request_file import RequestError

_NOTHING_PROVEN = 3
"""Exit status of a verification without any cache hit."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"omni {version('omni-pipeline')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Multi-stage model pipelines with prefix caching that never changes the outputs."""


@command(app, RunOptions)
def run(options: RunOptions) -> bool:
    """Run requests through a pipeline. Exit status 1 if any of them failed."""
    _check_output_flags(options)
    pipeline = _load_with_flags(options)
    requests, digest = _requests(pipeline, options, options.input_file)
    from omni.commands.run_command import run_requests

    with _writer(pipeline, digest, len(requests), options) as writer:
        return run_requests(
            pipeline, requests, writer=writer, quiet=options.quiet, trace=options.trace
        )


@command(app, ValidateOptions)
def validate(options: ValidateOptions) -> bool:
    """Check a pipeline's YAML file, and a file of requests, without loading any model."""
    pipeline = _load(options.config, options, options.overrides)
    _check_voices(pipeline, options.config, options.overrides)
    typer.echo(f"{options.config}: valid; stages: {', '.join(pipeline.topological_order())}")
    for name, transform in pipeline.custom_transforms().items():
        typer.echo(f"stage {name}: its transform {transform} is there; it was not run")
    if options.input_file is not None:
        requests, _ = _read_file(pipeline, options.input_file)
        _refuse_bad_lines(requests)
        typer.echo(f"{options.input_file}: valid; requests: {len(requests)}")
    return True


@command(app, ExplainOptions)
def explain(options: ExplainOptions) -> bool:
    """Show a pipeline's graph, every setting with its default, limits, and reserved memory."""
    from engine.interface.cpu_threads import available_cores
    from omni.commands.explanation import (
        describe_config,
        describe_memory,
        describe_needs,
        describe_serving,
        draw_graph,
        draw_placement,
    )

    pipeline = _load(options.config, options, options.overrides)
    typer.echo(
        f"{draw_graph(pipeline)}\n\n{draw_placement(pipeline, available_cores())}\n\n"
        f"{describe_needs(pipeline)}\n\n{describe_serving(pipeline)}\n\n"
        f"{describe_config(pipeline)}"
    )
    if options.load:  # slow, and fails without the models
        typer.echo(f"\n{describe_memory(pipeline)}")
    return True


@command(app, VerifyOptions)
def verify(options: VerifyOptions) -> bool:
    """Run your own requests with and without caches, and compare.

    Exit status 1 if anything differed or a request failed, 3 if nothing was hit, which proves
    nothing.
    """
    pipeline = _load_with_flags(options)
    requests = _refuse_bad_lines(_requests(pipeline, options, options.input_file)[0])
    from omni.runtime.omni import Omni
    from omni.verification.verify import verify as verify_requests

    with Omni(pipeline) as omni:
        report = verify_requests(omni, requests, atol=options.atol, exact=options.exact)
    typer.echo("\n".join(report.lines()))
    if report.equal and not report.failures and not report.has_hits:
        raise Stopped("error: nothing was proven, since nothing was hit", _NOTHING_PROVEN)
    return report.equal and not report.failures


@command(app, ServeOptions)
def serve(options: ServeOptions) -> bool:
    """Serve pipelines over HTTP, with an OpenAI-compatible API."""
    # Check all of them before anything starts.
    pipelines = [_load(config, options) for config in options.configs]
    for pipeline, config in zip(pipelines, options.configs, strict=True):
        _check_voices(pipeline, config)
    serve_pipelines(pipelines, options)
    return True


@command(app, BenchOptions)
def bench(options: BenchOptions) -> bool:
    """Measure a pipeline, or a server with OpenAI's API, under load.

    Exit status 1 if a request failed; those refused with status 429 are counted separately.
    """
    from omni.commands.bench_command import run_bench

    return run_bench(options, lambda config: _load(config, options, options.overrides))


@command(app, DemoOptions)
def demo(options: DemoOptions) -> bool:
    """Ask spoken_sums aloud; show what it hears and says, its cache hits and latencies."""
    from omni.commands.demo import run_demo

    return run_demo(options.output_dir)


@command(app, ConvertOptions)
def convert(options: ConvertOptions) -> bool:
    """Convert a CTranslate2 Whisper, such as faster-whisper's, to a checkpoint folder."""
    from engine.models.whisper import ctranslate2

    ctranslate2.convert(options.folder, options.out)
    return True


@command(app, ListOptions, name="list")
def list_names(options: ListOptions) -> bool:
    """List names that a YAML file can use: pipelines, models, architectures, transforms, kinds."""
    typer.echo("\n\n".join(_described_names(options.what)))
    return True


@command(app, CommandOptions)
def schema(_: CommandOptions) -> bool:
    """Print the JSON Schema of a pipeline's YAML file, for editors and other programs."""
    import json

    from omni.pipelines.config_schema import config_schema

    typer.echo(json.dumps(config_schema(), indent=2))
    return True


def _load(config: str, where: RuntimeFlags, overrides: list[str] | None = None) -> PipelineConfig:
    from omni.pipelines.config_file import parse_overrides
    from omni.pipelines.pipeline_config import PipelineConfig

    labels = {"runtime.kind": "--runtime", "runtime.address": "--address"}
    return PipelineConfig.load(
        config,
        parse_overrides(overrides or []) | where.runtime_overrides,
        flag="--set",
        labels={place: labels[place] for place in where.runtime_overrides},
    )


def _load_with_flags(options: RunOptions | VerifyOptions) -> PipelineConfig:
    """Load a pipeline and apply the sampling and speaker flags."""
    pipeline = options.with_sampling(_load(options.config, options, options.overrides))
    if options.speaker is None:
        return pipeline
    if not options.speaker:
        raise ValueError("--speaker must not be empty")
    pipeline = pipeline.model_copy(update={"speaker": options.speaker})
    pipeline.check_speaker()  # for stages with local checkpoints
    return pipeline


def _check_voices(
    pipeline: PipelineConfig, config: str, overrides: list[str] | None = None
) -> None:
    """Check the voice names in a user's file; skip shipped files, which need not wait for torch."""
    from omni.pipelines.config_file import shipped_configs

    if config in shipped_configs() and not overrides:
        return
    try:
        pipeline.check_speaker()
    except ValueError as error:
        raise ValueError(f"{config}: {error}") from error


def _requests(
    pipeline: PipelineConfig, flags: PromptFlags, input_file: Path | None
) -> tuple[list[OmniRequest | RequestError], str]:
    """Return the requests, and the SHA-256 of the file or the flags that they come from."""
    if flags.given == (input_file is not None):
        raise ValueError(
            "give either --chat, --prompt, --audio or --encoder-prompt, once or several times, or "
            "--input"
        )
    if input_file is not None:
        return _read_file(pipeline, input_file)
    requests = flags.requests()
    flags.check_files(pipeline.modalities())
    return [*requests], flags.digest()


def _read_file(
    pipeline: PipelineConfig, input_file: Path
) -> tuple[list[OmniRequest | RequestError], str]:
    import hashlib

    from omni.requests.request_file import read_requests

    sampling = {name: stage.own_sampling for name, stage in pipeline.stages.items()}
    digest = hashlib.sha256()
    # Pass a str: the file may be "-".
    requests = read_requests(os.fspath(input_file), sampling, digest.update)
    return requests, digest.hexdigest()


def _refuse_bad_lines(requests: list[OmniRequest | RequestError]) -> list[OmniRequest]:
    from omni.requests.request import OmniRequest

    good = [request for request in requests if isinstance(request, OmniRequest)]
    bad = [request.message for request in requests if not isinstance(request, OmniRequest)]
    if bad:
        raise ValueError("\n".join(bad))
    return good


def _check_output_flags(options: RunOptions) -> None:
    if options.resume and options.overwrite:
        raise ValueError("--resume keeps outputs and --overwrite replaces them: give one of them")
    if options.output_dir is None and (options.resume or options.overwrite):
        flag = "--resume" if options.resume else "--overwrite"
        raise ValueError(f"{flag} is about the outputs in --output-dir: give that too")


def _writer(
    pipeline: PipelineConfig, digest: str, num_requests: int, options: RunOptions
) -> OutputWriter | nullcontext[None]:
    """Open the writer of ``--output-dir``, if given, which raises if the folder is unusable."""
    if options.output_dir is None:
        return nullcontext()
    from omni.requests.output_writer import Existing, OutputWriter, RunRecord

    existing = Existing.RESUME if options.resume else Existing.REFUSE
    return OutputWriter(
        options.output_dir,
        {name: stage.final_output for name, stage in pipeline.stages.items() if stage.final_output},
        RunRecord.of(pipeline, digest, num_requests),
        Existing.OVERWRITE if options.overwrite else existing,
    )


_HEADINGS = {
    "pipelines": "Pipelines, for omni run NAME:",
    "models": "Seeded models, small and random, for model: NAME:",
    "kinds": "Kinds of stages, for kind: NAME:",
    "transforms": "Transforms, for inputs: {transform: NAME}:",
    "architectures": "Architectures of checkpoints, as config.json names them:",
}


def _described_names(what: str | None = None) -> Iterator[str]:
    """Yield a block of text for each kind of name, or only for the kind ``what``."""
    for sort, heading in _HEADINGS.items():
        if what in (sort, None):
            yield "\n".join([heading, *(f"  {line}" for line in _lines_of(sort))])


def _lines_of(sort: str) -> Iterable[str]:
    match sort:
        case "pipelines":
            from omni.pipelines.config_file import shipped_configs
            from omni.pipelines.pipeline_config import PipelineConfig

            names = shipped_configs()
            width = max(map(len, names))
            for name in names:
                yield f"{name.ljust(width)}  {PipelineConfig.load(name).description or ''}".rstrip()
        case "models":
            from omni.seeded.checkpoints import SEEDED_MODELS, SEEDED_PREFIX

            yield from (SEEDED_PREFIX + name for name in SEEDED_MODELS)
        case "kinds":
            from stages.stage_config import stage_kind_names

            yield from stage_kind_names()
        case "transforms":
            from stages import registered_transforms

            yield from registered_transforms()
            yield "and your own: package.module:function"
        case "architectures":
            from engine.models.registry import FAMILIES

            FAMILIES.load_entry_points()
            yield from FAMILIES.architectures()
            yield from FAMILIES.architectures(makes_sound=True)
            yield "and, for stages of kind encoder, text encoders of transformers such as BertModel"
