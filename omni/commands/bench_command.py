"""The ``omni bench`` command: measures a pipeline or a server under load."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from omni.commands.bench.load import Measurement, RequestLines, parse_levels
from omni.commands.bench.report import (
    BenchReport,
    LevelReport,
    failure_lines,
    parse_goodput,
    report_tables,
    save_plot,
)
from omni.commands.command import Stopped
from omni.commands.options import BenchOptions
from omni.commands.run_progress import RunProgress

if TYPE_CHECKING:
    from omni.commands.bench.http_target import HttpTarget
    from omni.commands.bench.load import LoadTarget
    from omni.pipelines.pipeline_config import PipelineConfig

_MAX_DESCRIPTORS = 65_536
_TABLE_WIDTH = 110
"""Width of tables that are written to a file or a pipe."""

_URL_FLAGS = ("model", "api_key", "speech", "voice")
_PIPELINE_FLAGS = ("runtime", "address", "overrides")
_TEXT_FLAGS = ("max_tokens", "ignore_eos", "temperature", "turns")
_SYNTHETIC_FLAGS = (
    *("prompt_tokens", "max_tokens", "ignore_eos", "temperature"),
    *("shared_prefix_tokens", "prefixes", "turns"),
)
_NOT_WITH_INPUT = "is about requests that are made up; the lines of --input say it themselves"
_FLAG_NAMES = {"overrides": "--set", "input_file": "--input"}
_NOT_SETTINGS = {"api_key", "json", "plot", "verbose", "quiet", "debug"}
_DEFAULTS = {each.name: each.default for each in fields(BenchOptions)}


def run_bench(options: BenchOptions, load_config: Callable[[str], PipelineConfig]) -> bool:
    """Run the benchmark and print its report, even if interrupted.

    Returns:
        True if requests were answered and none failed; status 429 is not a failure.

    Raises:
        ValueError: a flag, a file or the pipeline is wrong, the server cannot be reached, or the
            first request is refused.
        Stopped: interrupted; the partial report has been printed.
    """
    _check(options)
    levels = parse_levels(options.concurrency, options.rate)
    limits = {} if options.goodput is None else parse_goodput(options.goodput)
    server = _create_target(options) if options.url is not None else None
    lines = None if options.input_file is None else RequestLines(options.input_file)
    num_conversations = options.num_conversations(None if lines is None else len(lines))
    if options.config is not None:
        config = load_config(options.config)
        name = f"{config.name}, in process"
    else:
        name = " at ".join(filter(None, (options.model, options.url)))
    total = num_conversations * options.turns * len(levels) if options.duration is None else None
    progress = RunProgress(total, 0, shown=not options.quiet)
    measurement = Measurement(
        levels,
        options,
        num_conversations,
        on_begin=progress.begin,
        on_end=lambda _: progress.advance(),
    )

    async def measure(entered: AbstractAsyncContextManager[LoadTarget]) -> None:
        async with entered as target:
            await measurement.run(target, None if lines is None else lines.prepared(target))

    interrupt: KeyboardInterrupt | None = None
    try:
        with progress:
            if server is not None:
                _allow_many_connections()
                asyncio.run(measure(server))
            else:
                # Imported here so that measuring a server does not wait for torch.
                from omni.commands.bench.pipeline_target import PipelineTarget
                from omni.runtime.omni import Omni

                with Omni(config) as omni:
                    asyncio.run(measure(nullcontext(PipelineTarget(omni, config))))
    except KeyboardInterrupt as caught:
        interrupt = caught
    reports = [LevelReport.of(run, limits) for run in measurement.runs]
    report = BenchReport(name, _settings(options), reports, interrupt is None)
    _print(report, options)
    if interrupt is not None:
        done = sum(len(run.records) for run in measurement.runs)
        message = f"interrupted: what stands above is of the {done} requests that had ended"
        raise Stopped(message if done else "interrupted") from interrupt
    return not report.has_failures


def _allow_many_connections() -> None:
    """Raise the limit of open file descriptors: each request in flight needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _print(report: BenchReport, options: BenchOptions) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    for table in report_tables(report):
        console.print(table)
    errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for line in failure_lines(report):
        errors.print(line)
    if options.json is not None and report.levels:
        report.save(options.json)
    if options.plot is not None and report.levels:
        save_plot(report, options.plot)


def _check(options: BenchOptions) -> None:
    """Check the flags and their combinations."""
    if (options.config is None) == (options.url is None):
        raise ValueError("give either a pipeline or --url")
    if options.url is None:
        _reject(options, _URL_FLAGS, "goes together with --url")
    else:
        _reject(options, _PIPELINE_FLAGS, "is about a pipeline in this process, not about --url")
    if not options.is_text:
        name = options.endpoint
        if options.url is None:
            raise ValueError(f"--endpoint {name} goes together with --url")
        _reject(options, _TEXT_FLAGS, f"says nothing to --endpoint {name}")
        if name == "transcriptions" and options.input_file is None:
            raise ValueError(f"--endpoint {name} goes together with --input: no speech is made up")
    elif options.input_file is not None:
        _reject(options, ("endpoint",), _NOT_WITH_INPUT)
    if options.input_file is not None:
        _reject(options, _SYNTHETIC_FLAGS, _NOT_WITH_INPUT)
    for flag, path, suffix in (("--json", options.json, ""), ("--plot", options.plot, ".svg")):
        if path is not None:
            _check_file(flag, path, suffix)
    if options.plot is not None and find_spec("matplotlib") is None:
        raise _missing_package("--plot", "matplotlib")
    if options.shared_prefix_tokens >= options.synthetic_tokens:
        raise ValueError(
            f"--shared-prefix-tokens ({options.shared_prefix_tokens}) must be fewer than "
            f"--prompt-tokens ({options.synthetic_tokens}): each request has words of its own too"
        )


def _reject(options: BenchOptions, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(options, name) != _DEFAULTS[name]:
            raise ValueError(f"{_flag(name)} {why}")


def _flag(name: str) -> str:
    return _FLAG_NAMES.get(name, "--" + name.replace("_", "-"))


def _check_file(flag: str, path: Path, suffix: str) -> None:
    """Check that a file can be written now, not after an hour of measuring."""
    if suffix and path.suffix.lower() != suffix:
        raise ValueError(f"{flag}: must end in {suffix}, got {str(path)!r}")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{flag}: {str(path)!r} cannot be written there")


def _missing_package(flag: str, package: str | None) -> ValueError:
    return ValueError(
        f"omni bench {flag} needs a package that is not installed ({package}): "
        "pip install -e '.[bench]' in a checkout of omni-pipeline"
    )


def _create_target(options: BenchOptions) -> HttpTarget:
    try:
        from omni.commands.bench.http_target import HttpTarget
    except ImportError as error:
        raise _missing_package("--url", error.name) from error
    return HttpTarget(options)


def _settings(options: BenchOptions) -> dict[str, Any]:
    """Collect the flags that differ from their defaults, without secrets."""
    given = {name: getattr(options, name) for name in _DEFAULTS if name not in _NOT_SETTINGS}
    return {
        _flag(name).removeprefix("--"): str(value) if isinstance(value, Path) else value
        for name, value in given.items()
        if value != _DEFAULTS[name]
    }
