"""Pages per layer type compared with pages of one size: capacity, steps and bookkeeping.

    python benchmarks/hybrid_memory.py [--requests 128] [--rounds 9] [--steps 256]

The scheduler and the KV-cache manager are the engine's; there is no model, since only page ids are
allocated: the geometries are those of models far larger than this machine could run. Both sides
run the same code, one of them with the groups of :func:`prefix_cache.one_size_groups`.

* *capacity*: maximum concurrent requests of one length, each prefilled in chunks. The budget is
  the memory of 32 of them in pages of one size.
* *mixed lengths*: a seeded trace, queued at the start. Prompt lengths are distributed uniformly in
  the logarithm. Throughput is in scheduler steps, not in seconds: a step with more requests takes
  a real model longer, but less than proportionally while it is bound by loading weights.
  Images have from a quarter to all of the geometry's tokens; they use memory, but no tokens of a
  step's budget, on both sides.
* *bookkeeping*: ``Scheduler.schedule`` and ``Scheduler.complete`` with 64 decoding requests, with
  caching on; microseconds per request and step.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
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
    CrossAttentionSpec,
    EncoderBlocks,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
    group_layers,
    one_size_groups,
    request_bytes,
)

BLOCK_SIZE = 16
CHUNK, TRACE_CHUNK = 2048, 8192  # tokens of a step
CAPACITY_BUDGET, TRACE_BUDGET = 32, 16  # requests of full length in pages of one size
HEADS = (8, 128, torch.bfloat16)


@dataclass(frozen=True)
class Geometry:
    """The cached layers of a model, and the request lengths of its measurements.

    Attributes:
        layers: a period of layers, and the number of its repetitions.
        num_tokens: tokens of a request in the table of capacities.
        prompts: shortest and longest prompt of the trace.
        num_image_tokens: image tokens of each request.
        goal: minimum capacity relative to pages of one size, if any.
    """

    name: str
    layers: tuple[tuple[KVCacheSpec, ...], int]
    num_tokens: int
    prompts: tuple[int, int]
    num_image_tokens: int = 0
    goal: float | None = None

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """Groups with separate pages for each layer type."""
        period, times = self.layers
        return group_layers({f"layer.{i}": spec for i, spec in enumerate(period * times)})


def geometries() -> list[Geometry]:
    wide = (8, 256, torch.bfloat16)
    full = FullAttentionSpec(BLOCK_SIZE, *HEADS)
    cross = CrossAttentionSpec(BLOCK_SIZE, *HEADS)
    gemma2 = (SlidingWindowSpec(BLOCK_SIZE, *wide, 4096), FullAttentionSpec(BLOCK_SIZE, *wide))
    sliding = SlidingWindowSpec(BLOCK_SIZE, *HEADS, 32_768)
    states = (StateTensor((3, 8192), torch.bfloat16), StateTensor((8192, 16), torch.float32))
    mamba = MambaSpec(BLOCK_SIZE, states)
    jamba = (*[mamba] * 4, full, *[mamba] * 3)
    return [
        Geometry("Gemma-2, 8,192 tokens", (gemma2, 21), 8192, (512, 7680), goal=1.3),
        Geometry(
            "Ministral, 131,072 tokens", ((full, *[sliding] * 3), 9), 131_072, (2048, 130_000),
            goal=2.2,
        ),
        Geometry("Jamba, 8,192 tokens", (jamba, 4), 8192, (512, 7680)),
        Geometry(
            "mllama, 43 + 6,193 tokens", ((*[full] * 4, cross), 8), 43, (16, 512),
            num_image_tokens=6193, goal=4.5,
        ),
    ]  # fmt: skip


def manager_of(
    groups: tuple[KVCacheGroup, ...], num_bytes: int, *, chunk: int = CHUNK, caching: bool = False
) -> KVCacheManager:
    page_bytes = KVCacheConfig(2, groups).large_page_bytes
    return KVCacheManager(
        KVCacheConfig(1 + num_bytes // page_bytes, groups),
        enable_prefix_caching=caching,
        output_names=(),
        max_num_batched_tokens=chunk,
    )


def one_size_request_bytes(geometry: Geometry) -> int:
    probe = KVCacheManager(KVCacheConfig(2, one_size_groups(geometry.groups)))
    return request_bytes(probe, geometry.num_tokens, geometry.num_image_tokens)


def capacity(geometry: Geometry, groups: tuple[KVCacheGroup, ...], num_bytes: int) -> int:
    """Count the requests that fit at once, each at its full length."""
    manager = manager_of(groups, num_bytes)
    image = EncoderBlocks(geometry.num_image_tokens, ())
    count = 0
    while True:
        computed = 0
        while computed < geometry.num_tokens:
            rest = geometry.num_tokens - computed
            # The last token runs separately, as in decoding.
            end = computed + min(CHUNK, max(1, rest - 1))
            if not manager.allocate_slots(
                f"r{count}", end, num_computed_tokens=computed, encoder=image
            ):
                return count
            computed = end
        count += 1


def make_request(
    index: int, num_prompt_tokens: int, num_output_tokens: int, num_image_tokens: int = 0
) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens)
    # Prompts share no tokens.
    prompt = [index] * num_prompt_tokens
    return Request(
        request_id=f"r{index}",
        token_ids=prompt,
        num_prompt_tokens=num_prompt_tokens,
        prompt_embeds=None,
        params=params,
        max_num_tokens=num_prompt_tokens + num_output_tokens,
        queue_key=(0, index),
        cache_salt=None,
        sampling=SamplingState(
            params, prompt_token_ids=prompt, seed=0, eos_token_ids=(), vocab_size=2**20
        ),
        text=CompletionText(None, params, frozenset()),
        encoder_blocks=EncoderBlocks(num_image_tokens, ()) if num_image_tokens else None,
    )


def make_trace(geometry: Geometry, count: int) -> list[Request]:
    source = random.Random(0)
    shortest, longest = map(math.log, geometry.prompts)

    def draw(index: int) -> Request:
        prompt = round(math.exp(source.uniform(shortest, longest)))
        output = source.randint(128, 1024)
        image = source.randint(geometry.num_image_tokens // 4, geometry.num_image_tokens)
        return make_request(index, prompt, output, image)

    return [draw(index) for index in range(count)]


def scheduler_of(manager: KVCacheManager, num_seats: int, chunk: int) -> Scheduler:
    return Scheduler(
        manager,
        block_size=manager.block_size,
        max_num_seqs=num_seats,
        max_num_batched_tokens=chunk,
    )


def sample(scheduler: Scheduler, sampling: list[Request]) -> None:
    """Append a token to every request that sampled; finish those that are complete."""
    for request in sampling:
        request.token_ids.append(0)
        if request.num_tokens == request.max_num_tokens:
            scheduler.finish(request)


@dataclass(frozen=True)
class TraceRun:
    """Result of a trace."""

    num_steps: int
    mean_running: float
    num_preemptions: int


def run_trace(
    geometry: Geometry, groups: tuple[KVCacheGroup, ...], num_bytes: int, count: int
) -> TraceRun:
    manager = manager_of(groups, num_bytes, chunk=TRACE_CHUNK)
    scheduler = scheduler_of(manager, count, TRACE_CHUNK)
    for request in make_trace(geometry, count):
        scheduler.add(request)
    running: list[int] = []
    while scheduler.num_waiting or scheduler.num_running:
        output = scheduler.schedule()
        if not output.scheduled and not output.preempted:
            raise RuntimeError(f"{scheduler.num_waiting} requests of the trace can never run")
        running.append(scheduler.num_running)
        sampling = [item.request for item in output.scheduled if item.samples]
        scheduler.complete(output)
        sample(scheduler, sampling)
    return TraceRun(len(running), statistics.fmean(running), scheduler.num_preemptions)


def decode_seconds(groups: tuple[KVCacheGroup, ...], num_running: int, num_steps: int) -> float:
    """Measure seconds of bookkeeping per request of a decode step."""
    prompt = 512
    held = request_bytes(KVCacheManager(KVCacheConfig(2, groups)), prompt + num_steps)
    manager = manager_of(groups, 2 * num_running * held, caching=True)
    scheduler = scheduler_of(manager, num_running, CHUNK)
    for index in range(num_running):
        scheduler.add(make_request(index, prompt, 2 * num_steps))
    seconds, timed_steps = 0.0, 0
    while timed_steps < num_steps:
        started = time.perf_counter()
        output = scheduler.schedule()
        seconds_of_step = time.perf_counter() - started
        sampling = [item.request for item in output.scheduled if item.samples]
        started = time.perf_counter()
        scheduler.complete(output)
        seconds_of_step += time.perf_counter() - started
        if output.num_tokens == len(output.scheduled) == num_running:
            seconds += seconds_of_step
            timed_steps += 1
        sample(scheduler, sampling)
    if scheduler.num_preemptions:
        raise RuntimeError("the pool was to hold all requests, but some were preempted")
    return seconds / (num_steps * num_running)


def report_capacity(console: Console) -> None:
    table = Table(title=f"requests held at once, block size {BLOCK_SIZE}")
    for column in ("geometry, request", "budget", "one size", "ours", "ours / one size", "goal"):
        table.add_column(column, justify="left" if column.startswith("geometry") else "right")
    for geometry in geometries():
        num_bytes = CAPACITY_BUDGET * one_size_request_bytes(geometry)
        theirs = capacity(geometry, one_size_groups(geometry.groups), num_bytes)
        ours = capacity(geometry, geometry.groups, num_bytes)
        table.add_row(
            geometry.name,
            f"{num_bytes / 2**30:.1f} GiB",
            str(theirs),
            str(ours),
            f"{ours / theirs:.2f}",
            "" if geometry.goal is None else f"{geometry.goal}",
        )
    console.print(table)


def report_traces(console: Console, count: int) -> None:
    table = Table(title=f"{count} requests of mixed lengths, {TRACE_CHUNK} tokens a step")
    columns = ("geometry", "prompts", "budget", "pages", "requests running", "preemptions")
    for column in (*columns, "steps", "finished per 1,000 steps", "ours / one size"):
        table.add_column(column, justify="left" if column == "geometry" else "right")
    for geometry in geometries():
        num_bytes = TRACE_BUDGET * one_size_request_bytes(geometry)
        theirs = run_trace(geometry, one_size_groups(geometry.groups), num_bytes, count)
        ours = run_trace(geometry, geometry.groups, num_bytes, count)
        for kind, result in (("one size", theirs), ("ours", ours)):
            table.add_row(
                geometry.name.split(",")[0],
                "{:,} to {:,}".format(*geometry.prompts),
                f"{num_bytes / 2**30:.1f} GiB",
                kind,
                f"{result.mean_running:.1f}",
                str(result.num_preemptions),
                str(result.num_steps),
                f"{1000 * count / result.num_steps:.0f}",
                f"{theirs.num_steps / result.num_steps:.2f}" if result is ours else "",
            )
    console.print(table)


def report_bookkeeping(console: Console, rounds: int, num_running: int, num_steps: int) -> None:
    full = FullAttentionSpec(BLOCK_SIZE, *HEADS)
    sliding = SlidingWindowSpec(BLOCK_SIZE, *HEADS, window=256)
    mamba = MambaSpec(BLOCK_SIZE, (StateTensor((280, 512), torch.float32),))
    sides: dict[str, list[KVCacheSpec]] = {
        "one: full attention": [full],
        "two: and a sliding window": [full, sliding],
        "three: and recurrent layers": [full, sliding, mamba],
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, specs in sides.items():
            groups = group_layers({f"layer.{i}": spec for i, spec in enumerate(specs)})
            seconds[name].append(decode_seconds(groups, num_running, num_steps))
    one = seconds["one: full attention"]
    table = Table(title=f"bookkeeping, {num_running} decoding requests, {num_steps} steps")
    for column in ("groups", "median us", "min us", "max us", "groups / one"):
        table.add_column(column, justify="left" if column == "groups" else "right")
    for name, values in seconds.items():
        ratio = statistics.median(v / base for v, base in zip(values, one, strict=True))
        figures = (statistics.median(values), min(values), max(values))
        table.add_row(name, *(f"{1e6 * value:.2f}" for value in figures), f"{ratio:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=128, help="of each trace")
    parser.add_argument("--rounds", type=int, default=9, help="of the bookkeeping")
    parser.add_argument("--running", type=int, default=64, help="requests of the bookkeeping")
    parser.add_argument("--steps", type=int, default=256, help="of the bookkeeping")
    args = parser.parse_args()
    console = Console()
    report_capacity(console)
    report_traces(console, args.requests)
    report_bookkeeping(console, args.rounds, args.running, args.steps)


if __name__ == "__main__":
    main()
