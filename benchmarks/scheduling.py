"""Cost of a long queue per step: the scheduler over real block tables, without a model.

    python benchmarks/scheduling.py [--waiting 1000,10000] [--rounds 3] [--case NAME ...]

Each case builds the same scheduler twice: with a queue of only the requests that can be admitted in
the timed steps, and with a long one. Both admit the same requests in the same steps, so the
difference between their steps is the cost of the rest of the queue. The table shows for every case
the slowest step with the short queue and the long one, the maximum and the median difference of a
step, and the cost of adding a request. Goal: no step with 10,000 waiting requests costs 1 ms more
than the same step without them.

Times are the minimum of ``--rounds`` runs of the same steps, in milliseconds of ``schedule``.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from engine.interface.sampling_params import SamplingParams
from engine.requests.request import Request
from engine.sampling.sampler import SamplingState
from engine.scheduling.scheduler import Scheduler
from engine.text.stop_checker import CompletionText
from prefix_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
)

BLOCK_SIZE = 16
BUDGET = 2048
SEATS = 16
PREFIX = 900
NUM_STEPS = 8

ATTENTION = KVCacheGroup(("attention",), FullAttentionSpec(BLOCK_SIZE, 1, 1, torch.float32))
MODELS = {
    "attention": (ATTENTION,),
    "window": (
        ATTENTION,
        KVCacheGroup(
            ("window",), SlidingWindowSpec(BLOCK_SIZE, 1, 1, torch.float32, window=4 * BLOCK_SIZE)
        ),
    ),
    "jamba": (
        ATTENTION,
        KVCacheGroup(
            ("state",), MambaSpec(BLOCK_SIZE, (StateTensor((2 * BLOCK_SIZE,), torch.float32),))
        ),
    ),
}


class Run:
    """A scheduler, and a model that always generates token 7."""

    def __init__(self, model: str, num_blocks: int = 4000) -> None:
        self.kv = KVCacheManager(
            KVCacheConfig(num_blocks, MODELS[model]), output_names=(), max_num_batched_tokens=BUDGET
        )
        self.scheduler = Scheduler(
            self.kv, block_size=BLOCK_SIZE, max_num_seqs=SEATS, max_num_batched_tokens=BUDGET
        )
        self.num_added = 0
        self.adding_s = 0.0

    def add(self, prompt: list[int], *, max_tokens: int = 64, priority: int = 0) -> Request:
        """Queue a request."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = Request(
            request_id=f"r{self.num_added}",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            prompt_embeds=None,
            params=params,
            max_num_tokens=len(prompt) + max_tokens,
            queue_key=(priority, self.num_added),
            cache_salt=None,
            sampling=SamplingState(params, (), seed=0, eos_token_ids=(), vocab_size=2**20),
            text=CompletionText(None, params, frozenset()),
        )
        self.num_added += 1
        started = time.perf_counter()
        self.scheduler.add(request)
        self.adding_s += time.perf_counter() - started
        return request

    def step(self) -> tuple[float, list[tuple[str, int]]]:
        """Run a step; return the seconds of ``schedule``, and each request's number of tokens."""
        started = time.perf_counter()
        output = self.scheduler.schedule()
        seconds = time.perf_counter() - started
        ran = [(item.request.request_id, item.num_tokens) for item in output.scheduled]
        sampling = [item.request for item in output.scheduled if item.samples]
        self.scheduler.complete(output)
        for request in sampling:
            request.token_ids.append(7)
            if request.num_tokens == request.max_num_tokens:
                self.scheduler.finish(request)
        return seconds, ran


def own(index: int, count: int) -> list[int]:
    """Return tokens that no other request has."""
    return list(range(2**16 + index * 512, 2**16 + index * 512 + count))


def prefix_in_flight(model: str, num_own: int) -> Callable[[int], Run]:
    """Create a case in which all requests share a prefix, and differ after it."""

    def build(num_waiting: int) -> Run:
        run = Run(model)
        for index in range(num_waiting):
            run.add([*range(PREFIX), *own(index, num_own)])
        return run

    return build


def same_prompts(model: str) -> Callable[[int], Run]:
    """Create a case in which all requests have the same prompt."""

    def build(num_waiting: int) -> Run:
        run = Run(model)
        for _ in range(num_waiting):
            run.add([*range(PREFIX), *own(0, 100)])
        return run

    return build


def conversations(model: str) -> Callable[[int], Run]:
    """Create a case in which all share a prefix, and pairs of them share the following tokens."""

    def build(num_waiting: int) -> Run:
        run = Run(model)
        for index in range(num_waiting):
            run.add([*range(PREFIX), *own(index // 2, 64), *own(2**14 + index, 8)])
        return run

    return build


def paused(num_waiting: int) -> Run:
    """Build a queue in which ten requests run, and all others are paused."""
    run = Run("attention")
    for index in range(10):
        run.add(own(index, 40))
    for index in range(10, num_waiting):
        run.scheduler.pause(run.add([*range(PREFIX), *own(index, 8)]))
    return run


def priorities(num_waiting: int) -> Run:
    """Build a queue of random priorities; every step finishes requests, the short queue's first."""
    run = Run("attention")
    source = random.Random(0)
    first = (NUM_STEPS + 1) * SEATS
    for index in range(first):
        run.add(own(index, 60), max_tokens=1 + index % 3, priority=source.randint(-9, -1))
    for index in range(first, num_waiting):
        run.add(own(index, 60), max_tokens=1 + index % 3, priority=source.randint(0, 9))
    return run


def isolated(num_waiting: int) -> Run:
    """Build a queue after a failed step, whose requests run one by one."""
    run = Run("attention")
    for index in range(num_waiting):
        run.add([*range(PREFIX), *own(index, 8)])
    for _ in range(3):
        run.step()
    run.scheduler.fault_isolation.recover(run.scheduler.schedule())
    return run


SHORT = {
    "priorities": (NUM_STEPS + 1) * SEATS,
    "conversations": 2 * SEATS + 2,
    "conversations, Jamba": 2 * SEATS + 2,
}
"""Length of the short queue, where it is not the maximum of running requests plus one."""

CASES: dict[str, Callable[[int], Run]] = {
    "prefix in flight": prefix_in_flight("attention", 8),
    "prefix in flight, long rest": prefix_in_flight("attention", 300),
    "prefix in flight, windows": prefix_in_flight("window", 8),
    "prefix in flight, Jamba": prefix_in_flight("jamba", 8),
    "prefix in flight, long rest, Jamba": prefix_in_flight("jamba", 300),
    "same prompts": same_prompts("attention"),
    "same prompts, Jamba": same_prompts("jamba"),
    "conversations": conversations("attention"),
    "conversations, Jamba": conversations("jamba"),
    "paused": paused,
    "priorities": priorities,
    "isolated after a fault": isolated,
}


@dataclass(frozen=True)
class Timed:
    """The steps of one case and queue, in milliseconds, each the minimum of all rounds."""

    steps: list[float]
    ran: list[list[tuple[str, int]]]
    add_us: float


def timed(build: Callable[[int], Run], num_waiting: int, rounds: int) -> Timed:
    rows: list[list[float]] = []
    ran: list[list[tuple[str, int]]] = []
    add_us = []
    for _ in range(rounds):
        run = build(num_waiting)
        add_us.append(run.adding_s / run.num_added * 1e6)
        gc.collect()
        gc.disable()
        steps = [run.step() for _ in range(NUM_STEPS)]
        gc.enable()
        rows.append([seconds * 1e3 for seconds, _ in steps])
        ran = [who for _, who in steps]
    return Timed([min(column) for column in zip(*rows, strict=True)], ran, min(add_us))


def measure(console: Console, names: list[str], lengths: list[int], rounds: int) -> None:
    table = Table("case", "waiting", "slowest, short", "slowest, long", "most", "median", "add, us")
    for name in names:
        short = timed(CASES[name], SHORT.get(name, SEATS + 1), rounds)
        for length in lengths:
            long = timed(CASES[name], length, rounds)
            if long.ran != short.ran:
                raise RuntimeError(f"{name}: a longer queue changed who runs")
            apart = [a - b for a, b in zip(long.steps, short.steps, strict=True)]
            figures = (max(short.steps), max(long.steps), max(apart), statistics.median(apart))
            table.add_row(
                name, f"{length:,}", *(f"{ms:.2f}" for ms in figures), f"{long.add_us:.0f}"
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", default="1000,10000", help="lengths of the long queues")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="only this one")
    args = parser.parse_args()
    lengths = [int(length) for length in args.waiting.split(",")]
    measure(Console(width=120), args.case or list(CASES), lengths, args.rounds)


if __name__ == "__main__":
    main()
