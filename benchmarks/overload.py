"""A server under heavy overload, and clients that disconnect at random points.

Run it on a quiet machine::

    python -m benchmarks.overload --seconds 60 --clients 500

The server runs in a separate process. The sender in this process is minimal: a client library
would need a core of its own. Both share the machine's cores, unless ``--apart`` separates them:
then all delays are those of the server.

1. A closed loop measures the server's capacity, and records the answer to every prompt.
2. Requests arrive at eight times that rate. Every accepted one must get the same answer as before;
   the others must get status 429 within 50 ms; the server's memory must stay flat; and afterwards
   the first request must be as fast as before.
3. 500 clients disconnect at random points: before all is sent, before anything arrives, and in the
   middle of streams. Nothing may be left of them: no request, no block, no open descriptor.

The exit status is 1 if a count is wrong. Times do not affect it: each is printed with its goal,
and with the lag of the sender's own event loop, which delays every measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from benchmarks.lean_sender import LeanSender
from benchmarks.served import MemoryWatch, Served
from omni.commands.bench.flags import BenchFlags
from omni.commands.bench.load import (
    LevelRun,
    LoadLevel,
    MeasuredRequest,
    RequestFailure,
    Send,
    line_source,
    synthetic_text,
)
from omni.commands.bench.report import LevelReport

_OVERLOAD = 8.0
_REFUSAL_GOAL_S = 0.05
_NUM_PROMPTS = 32
_PIPELINE = {
    "name": "overloaded",
    "stages": {
        "writer": {
            "kind": "autoregressive",
            "model": "seeded:qwen2-medium",
            "engine": {"num_blocks": 512, "max_num_batched_tokens": 512, "max_num_seqs": 8},
            "sampling": {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True},
            "outputs": [],
            "final_output": "text",
        }
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--max-waiting-requests", type=int, default=16)
    parser.add_argument("--apart", action="store_true", help="the server on a core of its own")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    flags = ("--max-waiting-requests", str(given.max_waiting_requests))
    wrong: list[str] = []
    cores = sorted(os.sched_getaffinity(0))
    if given.apart:
        os.sched_setaffinity(0, cores[:1])  # the server inherits it
    with Served(_PIPELINE, flags) as served:
        if given.apart:
            os.sched_setaffinity(0, cores[1:])
        gc.collect()
        gc.freeze()  # a full collection would delay the sender
        asyncio.run(_overload(served, given, wrong))
        if given.clients:
            asyncio.run(_leave(served, given, wrong))
    for line in wrong:
        print(f"WRONG: {line}")
    sys.exit(bool(wrong))


async def _overload(served: Served, given: argparse.Namespace, wrong: list[str]) -> None:
    sender = LeanSender(served.url)
    sends = [
        sender.prepare(
            "/v1/completions", {"model": _PIPELINE["name"], "prompt": synthetic_text(64, number)}
        )
        for number in range(_NUM_PROMPTS)
    ]
    expected = [await send(MeasuredRequest(0.0)) for send in sends]
    checked = [partial(_answer_is, send, text) for send, text in zip(sends, expected, strict=True)]
    before = await _first_token(checked)
    capacity = await _run(checked, LoadLevel(concurrency=8), 128)
    rate = capacity.throughput_per_s["requests"]
    print(f"capacity: {rate:.1f} requests/s; overload: {_OVERLOAD * rate:.1f}")
    flags = BenchFlags(duration=given.seconds, seed=given.seed)
    with MemoryWatch(served) as watch:
        report = await _run(checked, LoadLevel(rate=_OVERLOAD * rate), 10**9, flags)
    after = await _first_token(checked)
    _print_report(report, rate, wrong)
    early, late = watch.peaks()
    print(f"memory, second and last quarter: {early / 2**20:.1f} and {late / 2**20:.1f} MiB")
    print(f"first token, alone: {1000 * before:.1f} ms before, {1000 * after:.1f} ms after")
    _check_idle(served, wrong)


def _print_report(report: LevelReport, capacity: float, wrong: list[str]) -> None:
    counts = report.requests
    print(
        f"accepted and answered: {counts.ok}, {report.throughput_per_s['requests']:.1f} requests/s"
    )
    print(f"refused with 429: {counts.rejected}; failed: {dict(counts.failures)}")
    if counts.failed:
        wrong.append(f"{counts.failed} requests failed: {dict(counts.examples)}")
    if not counts.ok or not counts.rejected:
        wrong.append("none was accepted, or none refused")
    refusals, lag = report.rejection, report.generator.loop_lag
    if refusals is not None and lag is not None:
        print(
            f"429 after p50 {1000 * refusals.p50:.1f}, p99 {1000 * refusals.p99:.1f}, at most "
            f"{1000 * refusals.max:.1f} ms, goal {1000 * _REFUSAL_GOAL_S:.0f}; the sender's loop: "
            f"p99 {1000 * lag.p99:.1f}, at most {1000 * lag.max:.1f} ms late, "
            f"{report.generator.cpu_share:.0%} of a core"
        )


async def _answer_is(send: Send, text: str, record: MeasuredRequest) -> str:
    answer = await send(record)
    if answer != text:
        raise RequestFailure("another answer", f"{answer!r} instead of {text!r}")
    return answer


async def _run(
    sends: Sequence[Send], level: LoadLevel, number: int, flags: BenchFlags | None = None
) -> LevelReport:
    run = LevelRun(level, number, flags or BenchFlags())
    await run.run(line_source(sends))
    return LevelReport.of(run, {})


async def _first_token(sends: Sequence[Send]) -> float:
    """Measure the median seconds to the first token of requests that run alone."""
    report = await _run(sends, LoadLevel(concurrency=1), 16)
    return report.latencies["first_token"].p50


async def _leave(served: Served, given: argparse.Namespace, wrong: list[str]) -> None:
    """Run many clients that disconnect at random points."""
    chance = random.Random(given.seed)
    descriptors = served.process.num_fds()
    body = {"model": "overloaded", "stream": True, "max_tokens": 200, "n": 2}
    room = asyncio.Semaphore(24)
    began = time.monotonic()

    async def leave(number: int) -> None:
        async with room:
            text = synthetic_text(chance.randint(1, 64), "leaver", number)
            await _one_that_leaves(served.url, {**body, "prompt": text}, chance)

    await asyncio.gather(*(leave(number) for number in range(given.clients)))
    print(f"{given.clients} clients left within {time.monotonic() - began:.1f} s")
    _check_idle(served, wrong)
    left = served.process.num_fds() - descriptors
    if left > 2:
        wrong.append(f"{left} more descriptors are open than before")


async def _one_that_leaves(url: str, body: dict[str, Any], chance: random.Random) -> None:
    where = urlsplit(url)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    request = head.encode() + content
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        # A fifth disconnects before all is sent, the others while they wait or read.
        has_said_all = chance.random() < 0.8
        writer.write(request if has_said_all else request[: chance.randrange(len(request))])
        await writer.drain()
        async with asyncio.timeout(chance.expovariate(5.0)):
            while await reader.read(chance.choice((1, 100, 10_000))):
                pass
    except TimeoutError:
        pass
    finally:
        if chance.random() < 0.5:
            writer.transport.abort()  # RST instead of FIN
        writer.close()


def _check_idle(served: Served, wrong: list[str]) -> None:
    """Check that within 10 s no request runs or waits and no block is held."""
    end = time.monotonic() + 10
    names = ("omni_requests_running", "omni_requests_waiting")
    while True:
        left = {name: served.metric(name) for name in names} | {"blocks": served.held_blocks()}
        if not any(left.values()):
            print("nothing is left: no request runs or waits, no block is held")
            return
        if time.monotonic() > end:
            wrong.append(f"left behind: {left}")
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main()
