"""The ``omni run`` command: runs requests, with progress, texts or files, and a summary."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from omni.commands.command import Stopped
from omni.commands.run_progress import RunProgress
from omni.pipelines.pipeline_config import PipelineConfig
from omni.requests.output_writer import OutputWriter
from omni.requests.request import OmniOutput, OmniRequest
from omni.requests.request_file import RequestError
from omni.runtime.omni import Omni
from omni.runtime.trace import TraceError
from stages import StageOutput, StageStats


def run_requests(
    config: PipelineConfig,
    requests: Sequence[OmniRequest | RequestError],
    *,
    writer: OutputWriter | None = None,
    quiet: bool = False,
    trace: Path | None = None,
) -> bool:
    """Run all valid requests that are not done yet, and report each result as it finishes.

    Texts go to standard output; errors, progress and the summary go to standard error.

    Returns:
        True if every request succeeded.

    Raises:
        ValueError: the pipeline cannot be built.
        Stopped: interrupted, or the output cannot be written; the message says what was done.
    """
    run = _Run(requests, writer, quiet=quiet)
    try:
        if writer is None or writer.num_done < len(requests):
            run.through(config, trace)
        if writer is not None:
            run.finish(writer)
    except KeyboardInterrupt as interrupt:
        raise Stopped(f"interrupted: {run.describe_progress()}") from interrupt
    return not run.num_failed


class _Run:
    """A run of requests, with counts of those done and failed."""

    def __init__(
        self,
        requests: Sequence[OmniRequest | RequestError],
        writer: OutputWriter | None,
        *,
        quiet: bool,
    ) -> None:
        self._requests = requests
        self._writer = writer
        self._quiet = quiet
        self.num_done = self._num_kept = writer.num_done if writer else 0
        self.num_failed = self._num_failed_before = writer.num_failed if writer else 0

    def through(self, config: PipelineConfig, trace: Path | None) -> None:
        """Run the requests that are not done."""
        start = time.perf_counter()
        progress = RunProgress(len(self._requests), self._num_kept, shown=not self._quiet)
        try:
            with progress, Omni(config, trace=trace) as omni:
                progress.begin()
                for position, output in self._outputs(omni):
                    self._handle_output(position, output, progress)
                stats = omni.stats()
        except TraceError as error:
            raise self._write_failure(error) from error
        if not self._quiet:
            seconds = time.perf_counter() - start
            num_run = len(self._requests) - self._num_kept
            num_failed = self.num_failed - self._num_failed_before
            Console(stderr=True).print(summary_table(num_run, num_failed, stats, seconds))

    def finish(self, writer: OutputWriter) -> None:
        """Sort the output lines, and print where they are."""
        try:
            writer.finish()
        except OSError as error:
            raise self._write_failure(error) from error
        if not self._quiet:
            kept = f", {self._num_kept} of them before" if self._num_kept else ""
            typer.echo(
                f"{writer.location}: {self.num_done} requests{kept}, {self.num_failed} failed",
                err=True,
            )

    def _outputs(self, omni: Omni) -> Iterator[tuple[int, OmniOutput]]:
        """Yield every request's last output with its position, invalid lines first.

        An output with an error does not stop the others.
        """
        runnable = []
        position_of = {}
        for position, request in enumerate(self._requests):
            if self._writer is not None and self._writer.is_done(position):
                continue
            if isinstance(request, RequestError):
                yield position, OmniOutput(request.request_id, {}, True, request.message)
            else:
                position_of[request.request_id] = position
                runnable.append(request)
        for output in omni.stream(runnable):
            if output.finished:
                yield position_of[output.request_id], output

    def _handle_output(self, position: int, output: OmniOutput, progress: RunProgress) -> None:
        error = output.error
        if self._writer is not None:
            try:
                error = self._writer.write(position, output)
            except OSError as failure:
                raise self._write_failure(failure) from failure
        progress.echo(format_output(output))
        self.num_done += 1
        if error is not None:
            self.num_failed += 1
            progress.echo(f"{output.request_id}: error: {error}", err=True)
        progress.advance()

    def _write_failure(self, error: OSError) -> Stopped:
        where = f"{error.filename}: " if error.filename else ""
        return Stopped(f"error: {where}{error.strerror or error}; {self.describe_progress()}")

    def describe_progress(self) -> str:
        """Describe how far the run got, and how to resume it."""
        done = f"{self.num_done} of {len(self._requests)} requests are done"
        if self._writer is None:
            return f"{done}, and stand above" if self.num_done else done
        if not self.num_done:
            return done
        return f"{done}, in {self._writer.location}; the same command with --resume does the rest"


def format_output(output: OmniOutput) -> str:
    """Format the outputs of one request: a block of lines under its id."""
    lines = [f"=== {output.request_id}"]
    for name, stage in output.stages.items():
        lines += [f"--- {name}", *_format_stage(stage)]
    return "\n".join(lines)


def summary_table(
    num_requests: int, num_failed: int, stats: Mapping[str, StageStats], seconds: float
) -> Table:
    """Summarize a run: each stage's tokens, cache hits and busy time."""
    title = f"requests: {num_requests}, failed: {num_failed}; {seconds:.1f} s with loading"
    table = Table(title=title, title_justify="left")
    table.add_column("stage", no_wrap=True)
    columns = {
        "input tokens": [str(stage.prompt_tokens) for stage in stats.values()],
        "hit tokens": [str(stage.cached_tokens) for stage in stats.values()],
        "generated tokens": [str(stage.generated_tokens) for stage in stats.values()],
    }
    if any(stage.offload for stage in stats.values()):
        columns["of these from host / disk"] = [
            f"{stage.offload.host_hit_tokens} / {stage.offload.disk_hit_tokens}"
            if stage.offload
            else ""
            for stage in stats.values()
        ]
    # The reasons why prefixes were not hit further, the most frequent first.
    misses = [Counter(stage.kv.misses if stage.kv else {}) for stage in stats.values()]
    columns["not hit further"] = [
        ", ".join(f"{reason} {count}" for reason, count in each.most_common()) for each in misses
    ]
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


def _format_stage(output: StageOutput) -> Iterator[str]:
    if len(output.completions) > 1:
        for index, (text, *_) in enumerate(output.completions):
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
