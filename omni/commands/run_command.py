"""``omni run``: requests through a pipeline, with progress, texts or files, and a summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from omni.pipelines.pipeline_config import PipelineConfig
from omni.requests.output_writer import OutputWriter
from omni.requests.request import OmniOutput, OmniRequest
from omni.requests.request_file import RequestError
from omni.runtime.omni import Omni
from stages import StageOutput, StageStats

__all__ = ["format_output", "run_requests", "summary_table"]


def run_requests(
    config: PipelineConfig,
    requests: Sequence[OmniRequest | RequestError],
    *,
    output_dir: Path | None = None,
    quiet: bool = False,
) -> bool:
    """Run what can be run, and tell what became of every request, in their order.

    Texts go to the standard output, or to files in ``output_dir``; errors, progress and the
    summary go to the standard error.

    Args:
        config: the pipeline.
        requests: each has a request id; those of runnable ones are unique.
        output_dir: where to write, instead of printing the texts.
        quiet: neither progress bar nor summary.

    Returns:
        Whether every request came through.

    Raises:
        ValueError: the pipeline cannot be built.
        OSError: the output cannot be written.
    """
    final_output = {name: stage.final_output for name, stage in config.stages.items()}
    final_output = {name: forms for name, forms in final_output.items() if forms}
    texts: dict[int, str] = {}
    errors: dict[int, str] = {}
    start = time.perf_counter()
    with (
        Omni(config) as omni,
        OutputWriter(output_dir, final_output) if output_dir else nullcontext() as writer,
        _progress(len(requests), shown=not quiet) as advance,
    ):
        for position, output in _outputs(omni, requests):
            if writer is not None:
                writer.write(position, output)
            else:
                texts[position] = format_output(output)
            if output.error is not None:
                errors[position] = f"{output.request_id}: error: {output.error}"
            advance()
        stats = omni.stats()
    for position in sorted(texts):
        typer.echo(texts[position])
    for position in sorted(errors):
        typer.echo(errors[position], err=True)
    if not quiet:
        seconds = time.perf_counter() - start
        Console(stderr=True).print(summary_table(len(requests), len(errors), stats, seconds))
    return not errors


def format_output(output: OmniOutput) -> str:
    """Write what the user gets of one request: a block of lines under its id."""
    lines = [f"=== {output.request_id}"]
    for name, stage in output.stages.items():
        lines += [f"--- {name}", *_format_stage(stage)]
    return "\n".join(lines)


def summary_table(
    num_requests: int, num_failed: int, stats: Mapping[str, StageStats], seconds: float
) -> Table:
    """Sum up a run: what every stage ran, what its cache saved, and how long it was at it."""
    title = f"requests: {num_requests}, failed: {num_failed}; {seconds:.1f} s with loading"
    table = Table(title=title, title_justify="left")
    table.add_column("stage", no_wrap=True)
    columns = {
        "input tokens": [str(stage.prompt_tokens) for stage in stats.values()],
        "hit tokens": [str(stage.cached_tokens) for stage in stats.values()],
        "generated tokens": [str(stage.generated_tokens) for stage in stats.values()],
    }
    if any(stage.encoder_runs or stage.encoder_hits for stage in stats.values()):
        columns["encoder runs / hits"] = [
            f"{stage.encoder_runs} / {stage.encoder_hits}" for stage in stats.values()
        ]
    columns["seconds at work"] = [f"{stage.busy_s:.2f}" for stage in stats.values()]
    for heading in columns:
        table.add_column(heading, justify="right")
    for row in zip(stats, *columns.values(), strict=True):
        table.add_row(*row)
    return table


def _outputs(
    omni: Omni, requests: Sequence[OmniRequest | RequestError]
) -> Iterator[tuple[int, OmniOutput]]:
    """Yield every request's last output with its position: wrong lines first, others as they end.

    An output with an error does not stop the others.
    """
    runnable = []
    position_of = {}
    for position, request in enumerate(requests):
        if isinstance(request, RequestError):
            yield position, OmniOutput(request.request_id, {}, True, request.message)
        else:
            position_of[request.request_id] = position
            runnable.append(request)
    for output in omni.stream(runnable):
        if output.finished:
            yield position_of[output.request_id], output


def _format_stage(output: StageOutput) -> Iterator[str]:
    if output.completions:
        for index, (text, _, _) in enumerate(output.completions):
            yield f"[{index}] {text}"
    elif output.text is not None:
        yield output.text
    elif output.token_ids:
        yield " ".join(str(token_id) for token_id in output.token_ids)
    if output.audio is not None:
        rate = output.audio.sampling_rate
        yield f"audio: {output.audio.duration_s:.2f} s, {rate} samples per second"
    if output.text is None:
        for name, tensor in output.tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield f"{name}: {dtype} {tuple(tensor.shape)}"


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Show a bar while requests run, where a person looks on; yields what advances it by one."""
    console = Console(stderr=True)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
