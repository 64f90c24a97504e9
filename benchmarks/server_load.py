"""Effect of concurrent users on each other, and of a slow reader on all others, over HTTP.

Run it on a quiet machine::

    python -m benchmarks.server_load --rounds 3

The server runs in a separate process, with the seeded voice pipeline; the sender is that of
``omni bench``, in this process, on the same cores. Each round runs all concurrencies, and every
figure is the median of the rounds' medians. The goal: first audio at concurrency 2 at most 1.8
times that at 1. Then clients request long answers and read nothing, while another client reads:
its end-to-end times are compared with those without them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from benchmarks.served import Served
from omni.commands.bench.flags import BenchFlags
from omni.commands.bench.http_target import HttpTarget
from omni.commands.bench.load import (
    LoadLevel,
    Measurement,
)
from omni.commands.bench.report import LevelReport

_GOAL = 1.8
_MEASURES = ("first_token", "first_audio", "real_time_factor", "end_to_end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", default="omni_speech")
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--requests", type=int, default=32, help="of each level and round")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    levels = [LoadLevel(concurrency=int(each)) for each in given.concurrency.split(",")]
    console = Console()
    with Served(given.pipeline) as served:
        reports = [
            report
            for number in range(given.rounds)
            for report in _measured(served, given, levels, seed=number)
        ]
        console.print(_table(reports))
        _judge(console, reports)
        _slow_reader(console, served, given)


def _measured(
    served: Served, given: argparse.Namespace, levels: Sequence[LoadLevel], *, seed: int
) -> list[LevelReport]:
    flags = BenchFlags(
        url=served.url,
        speech=True,
        prompt_tokens=given.prompt_tokens,
        max_tokens=32,
        seed=seed,
    )

    async def run() -> Measurement:
        measurement = Measurement(levels, flags, given.requests)
        async with HttpTarget(flags) as target:
            await measurement.run(target)
        return measurement

    reports = [LevelReport.of(run, {}) for run in asyncio.run(run()).runs]
    for report in reports:
        if report.requests.failed or report.requests.rejected:
            raise RuntimeError(f"requests failed: {report.requests}")
    return reports


def _medians(reports: Sequence[LevelReport], name: str) -> dict[int, float]:
    found = defaultdict(list)
    for report in reports:
        assert report.concurrency is not None
        found[report.concurrency].append(report.latencies[name].p50)
    return {concurrency: statistics.median(values) for concurrency, values in found.items()}


def _table(reports: Sequence[LevelReport]) -> Table:
    table = Table(title="medians, in seconds", title_justify="left")
    for heading in ("at once", "requests/s", *(name.replace("_", " ") for name in _MEASURES)):
        table.add_column(heading, justify="right")
    columns = {name: _medians(reports, name) for name in _MEASURES}
    for concurrency in columns["end_to_end"]:
        speeds = [
            report.throughput_per_s["requests"]
            for report in reports
            if report.concurrency == concurrency
        ]
        cells = [f"{columns[name][concurrency]:.3f}" for name in _MEASURES]
        table.add_row(str(concurrency), f"{statistics.median(speeds):.2f}", *cells)
    return table


def _judge(console: Console, reports: Sequence[LevelReport]) -> None:
    first = _medians(reports, "first_audio")
    if {1, 2} <= first.keys():
        ratio = first[2] / first[1]
        console.print(f"first audio at 2 over that at 1: {ratio:.2f}, goal {_GOAL}")
    lags = [report.generator.loop_lag for report in reports]
    worst = max(lag.p99 for lag in lags if lag is not None)
    share = max(report.generator.cpu_share for report in reports)
    console.print(f"the sender: loop late by {1000 * worst:.1f} ms (p99), {share:.0%} of a core")


def _slow_reader(console: Console, served: Served, given: argparse.Namespace) -> None:
    one = [LoadLevel(concurrency=1)]
    gaps: dict[str, list[float]] = defaultdict(list)
    for number in range(given.rounds):
        (alone,) = _measured(served, given, one, seed=100 + number)
        with _reads_nothing(served, given.pipeline):
            (beside,) = _measured(served, given, one, seed=200 + number)
        for name, report in (("alone", alone), ("beside a slow reader", beside)):
            gaps[name].append(report.latencies["end_to_end"].p50)
    for name, values in gaps.items():
        console.print(f"end to end {name}: {statistics.median(values):.3f} s")


@contextmanager
def _reads_nothing(served: Served, model: str) -> Iterator[None]:
    """Run clients that request long answers without reading, until these have been generated."""
    where = urlsplit(served.url)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me all that there is about the tides."}],
        "stream": True,
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    readers = []
    for _ in range(8):
        reader = socket.socket()
        # A small buffer, so that the data stay in the server.
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        reader.connect((where.hostname, where.port))
        reader.sendall(head.encode() + content)
        readers.append(reader)
    try:
        # While they run they cost as much as any request; measured is their cost afterwards.
        asyncio.run(_until_idle(served))
        yield
    finally:
        for reader in readers:
            reader.close()


async def _until_idle(served: Served) -> None:
    while served.metric("omni_requests_running") + served.metric("omni_requests_waiting"):
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    main()
