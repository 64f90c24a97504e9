"""Prefix hit rates of the engine's cache, of plain LRU, and of an optimum that knows the future.

    python -m benchmarks.hit_rates [--traces 12] [--only NAME] [--vllm]

The KV-cache manager is the engine's; there is no model, and tokens are numbers. Every side runs the
same traces under the same continuous batching: first come, first served, a maximum of running
requests, chunked prefill, outputs token by token, preemption from the end. Hits count at a
request's first admission.

* *random*: requests that begin like a random prefix of an earlier one, in a pool so small that
  little stays cached, over several kinds of layer groups. Every group's page has the same size.
* *realistic*: conversations, shared system prompts, agents' trees, retrieval with shuffled
  documents, a hot set next to a long scan.
* *plain LRU* is our manager with a single eviction order: blocks freed first are evicted first.
* *optimum* is a clairvoyant that evicts the blocks whose next use is furthest in the future
  (Belady), and keeps whole prefixes with the windows and states that their continuations need. It
  is exact for full attention alone, where all blocks are equal, and good for others.
* ``--vllm`` adds vLLM's ``KVCacheManager``, if installed.
"""

from __future__ import annotations

import argparse
import heapq
import importlib
import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

from prefix_cache import (
    BlockHash,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
    extend_block_hashes,
    partial_block_hash,
)
from prefix_cache.blocks.block_pool import LOW_PRIORITY

KINDS: dict[str, tuple[str, ...]] = {
    "full attention": ("full",),
    "full + window": ("full", "window"),
    "full + Mamba": ("full", "mamba"),
    "full + two windows": ("full", "window", "wide"),
    "full + window + Mamba": ("full", "window", "mamba"),
}


@dataclass(eq=False)
class Job:
    """One request of a trace.

    Attributes:
        index: its position in the trace, in order of arrival.
        tokens: prompt and output.
        hashes: hashes of all full blocks of ``tokens``.
    """

    index: int
    tokens: list[int]
    num_prompt_tokens: int
    hashes: list[BlockHash] = field(default_factory=list)
    num_known: int = 0
    num_computed: int = 0
    num_hit: int | None = None

    @property
    def name(self) -> str:
        """Its request id."""
        return str(self.index)

    @property
    def has_ended(self) -> bool:
        """True if its whole output has been generated."""
        return self.num_known > len(self.tokens)

    def partial_hash(self, block_size: int, num_tokens: int) -> BlockHash | None:
        """Return the hash of its first tokens if they end within a block, else None."""
        if num_tokens % block_size == 0:
            return None
        return partial_block_hash(self.hashes, self.tokens[:num_tokens], block_size)


@dataclass(frozen=True)
class Trace:
    """Requests, and the pool in which they run.

    Attributes:
        jobs: prompts and outputs.
        windows: window of the layers "window" and "wide", in tokens.
    """

    jobs: tuple[tuple[list[int], list[int]], ...]
    num_pages: int
    block_size: int = 16
    seats: int = 8
    chunk: int = 512
    windows: tuple[int, int] = (128, 512)

    def spec(self, kind: str) -> KVCacheSpec:
        """Create the spec of a layer type; pages of all types have the same size."""
        heads = (1, 8, torch.float32)
        match kind:
            case "full":
                return FullAttentionSpec(self.block_size, *heads)
            case "mamba":
                state = StateTensor((2 * self.block_size * 8,), torch.float32)
                return MambaSpec(self.block_size, (state,))
        return SlidingWindowSpec(self.block_size, *heads, self.windows[kind == "wide"])

    def new_jobs(self) -> list[Job]:
        """Create the requests, not started."""
        jobs = []
        for index, (prompt, output) in enumerate(self.jobs):
            job = Job(index, prompt + output, len(prompt))
            extend_block_hashes(job.hashes, job.tokens, self.block_size)
            jobs.append(job)
        return jobs


class Cache(Protocol):
    """One side: the interface of a block manager that batching needs."""

    def admit(self, job: Job, chunk: int) -> int | None:
        """Start a job after its prefix hit and return the end of its first chunk.

        None if it does not fit, -1 if it should wait for a block that another job computes.
        """

    def grow(self, job: Job, chunk: int) -> int | None:
        """Allocate blocks for the next chunk and return its end; None if there are none."""

    def computed(self, job: Job) -> None:
        """Handle the end of the step that computed ``job.num_computed`` tokens."""

    def free(self, job: Job) -> None:
        """Free all blocks of a job."""


class Ours:
    """The engine's manager, used as its scheduler does."""

    def __init__(self, trace: Trace, kinds: Sequence[str], jobs: Sequence[Job]) -> None:
        groups = tuple(KVCacheGroup((f"{kind}.0",), trace.spec(kind)) for kind in kinds)
        self.manager = KVCacheManager(
            KVCacheConfig(trace.num_pages + 1, groups),
            output_names=(),
            max_num_batched_tokens=trace.chunk,
        )
        self.num_running = 0

    def admit(self, job: Job, chunk: int) -> int | None:
        """See :class:`Cache`."""
        hashes = job.hashes[: job.num_known // self.manager.block_size]
        partial_hash = partial(job.partial_hash, self.manager.block_size)
        prefix = self.manager.find_cached_prefix(hashes, job.num_known, None, partial_hash)
        if prefix.in_flight:
            return -1
        if not self.manager.can_finish(job.num_known, prefix=prefix, headroom=self.num_running):
            return None
        start = prefix.num_tokens
        num_tokens = min(chunk, job.num_known - start)
        if prefix.stops is not None:
            num_tokens = prefix.stops.clip(start, num_tokens, job.num_known)
        if not self.manager.allocate_slots(
            job.name,
            start + num_tokens,
            num_computed_tokens=start,
            prefix=prefix,
            block_hashes=hashes,
        ):
            return None
        job.num_computed = start
        self.num_running += 1
        return start + num_tokens

    def grow(self, job: Job, chunk: int) -> int | None:
        """See :class:`Cache`."""
        num_tokens = min(chunk, job.num_known - job.num_computed)
        num_tokens = self.manager.clip_chunk(job.name, job.num_computed, num_tokens, job.num_known)
        end = job.num_computed + num_tokens
        if self.manager.allocate_slots(job.name, end, num_computed_tokens=job.num_computed):
            return end
        return None

    def computed(self, job: Job) -> None:
        """See :class:`Cache`."""
        self.manager.publish(job.name, job.hashes, job.num_computed)

    def free(self, job: Job) -> None:
        """See :class:`Cache`."""
        self.num_running -= 1
        if job.has_ended:
            partial_hash = partial(job.partial_hash, self.manager.block_size)
            self.manager.publish_partial(job.name, job.hashes, partial_hash, job.num_computed)
        self.manager.free(job.name)


class PlainLRU(Ours):
    """The same manager with plain LRU: blocks freed first are evicted first."""

    def __init__(self, trace: Trace, kinds: Sequence[str], jobs: Sequence[Job]) -> None:
        super().__init__(trace, kinds, jobs)
        pool: Any = self.manager.pool
        release = pool.release
        pool.release = lambda blocks, priority=0: release(blocks, LOW_PRIORITY)
        pool.demote = pool.renew = lambda *block: None


Key = tuple[int, BlockHash]
NEVER = 2**60


class Clairvoyant:
    """Optimal cache that knows the trace: evicts the blocks whose next use is furthest away.

    Jobs that run at once share their common blocks.
    """

    def __init__(self, trace: Trace, kinds: Sequence[str], jobs: Sequence[Job]) -> None:
        self.trace, self.kinds, self.size = trace, kinds, trace.block_size
        self.reach = [trace.windows[kind == "wide"] for kind in kinds]
        self.uses: dict[Key, list[int]] = {}
        self.now = -1
        self.held: Counter[Key] = Counter()
        self.tables: dict[int, set[Key]] = {}
        self.cached: dict[Key, int] = {}
        self.queue: list[tuple[int, int, Key]] = []
        self.num_running = 0
        seen: set[BlockHash] = set()
        for job in jobs:
            most = min((job.num_prompt_tokens - 1) // self.size, len(job.hashes))
            length = next((i for i in range(most) if job.hashes[i] not in seen), most)
            for key in self.needed(job, length):
                self.uses.setdefault(key, []).append(job.index)
            seen.update(job.hashes[: (len(job.tokens) - 1) // self.size])

    def needed(self, job: Job, length: int) -> list[Key]:
        """Return the cached blocks that a job needs to start after ``length`` blocks."""
        keys: list[Key] = []
        for group, kind in enumerate(self.kinds):
            first = self.first(group, kind, length * self.size) if length else 0
            keys += [(group, block_hash) for block_hash in job.hashes[first:length]]
        return keys

    def first(self, group: int, kind: str, num_computed: int) -> int:
        """Return the first block that a group needs to continue."""
        match kind:
            case "full":
                return 0
            case "mamba":
                return max(0, num_computed - 1) // self.size
        return max(0, num_computed - self.reach[group] + 1) // self.size

    def table(self, job: Job, start: int, end: int) -> set[Key]:
        """Return the blocks that a job holds while it computes tokens ``start`` to ``end``."""
        keys: set[Key] = set()
        last = -(-end // self.size)
        for group, kind in enumerate(self.kinds):
            first = self.first(group, kind, start)
            indices: Sequence[int] = range(first, last)
            if kind == "mamba":
                indices = sorted({first, last - 1} if start else {last - 1})
            for index in indices:
                whole = index < len(job.hashes)
                own = BlockHash(b"%d/%d" % (job.index, index))
                keys.add((group, job.hashes[index] if whole else own))
        return keys

    def next_use(self, key: Key) -> int:
        """Return the index of the next job that needs a block."""
        uses = self.uses.get(key, ())
        index = bisect_right(uses, self.now)
        return uses[index] if index < len(uses) else NEVER

    def admit(self, job: Job, chunk: int) -> int | None:
        """See :class:`Cache`."""
        most = (job.num_known - 1) // self.size
        length = most
        while length and not all(
            key in self.cached or key in self.held for key in self.needed(job, length)
        ):
            length -= 1
        start = length * self.size
        if not self.fits(job, start, job.num_known):
            return None
        self.now = max(self.now, job.index)
        job.num_computed = start
        self.num_running += 1
        self.tables[job.index] = set()
        end = min(start + chunk, job.num_known)
        self.move(job, start, end)
        return end

    def grow(self, job: Job, chunk: int) -> int | None:
        """See :class:`Cache`."""
        end = min(job.num_computed + chunk, job.num_known)
        new = self.table(job, job.num_computed, end)
        others = {key for key in self.held if self.held[key] > (key in self.tables[job.index])}
        if len(others | new) > self.trace.num_pages:
            return None
        self.move(job, job.num_computed, end)
        return end

    def fits(self, job: Job, start: int, end: int) -> bool:
        """Return True if a job's known tokens fit."""
        new = self.table(job, max(start, end - self.trace.chunk), end)
        room = self.trace.num_pages - len(self.held) - self.num_running * len(self.kinds)
        return len(new - self.held.keys()) <= room

    def move(self, job: Job, start: int, end: int) -> None:
        """Hold the blocks of the next chunk; cache released ones that a later job needs."""
        new, old = self.table(job, start, end), self.tables[job.index]
        # States and windows in the middle of a chunk are cached if a later job needs them.
        for index in range(start // self.size, end // self.size):
            for group, kind in enumerate(self.kinds):
                key = (group, job.hashes[index])
                if key not in new and kind != "full" and self.next_use(key) < NEVER:
                    self.keep(key, index)
        for key in new - old:
            self.held[key] += 1
            self.cached.pop(key, None)
        self.tables[job.index] = new
        self.release(job, old - new, start)
        self.shrink()

    def release(self, job: Job, keys: set[Key], num_computed: int) -> None:
        """Release blocks; full and computed ones may stay cached."""
        depth = {h: i for i, h in enumerate(job.hashes[: num_computed // self.size])}
        for key in keys:
            self.held[key] -= 1
            if not self.held[key]:
                del self.held[key]
                if key[1] in depth:
                    self.keep(key, depth[key[1]])

    def keep(self, key: Key, depth: int) -> None:
        """Cache a block if a later job needs it."""
        use = self.next_use(key)
        if key not in self.held and use < NEVER:
            self.cached[key] = use
            heapq.heappush(self.queue, (-use, -depth, key))

    def shrink(self) -> None:
        """Evict until all blocks fit; among equals those furthest from the start first."""
        while len(self.held) + len(self.cached) > self.trace.num_pages:
            use, depth, key = heapq.heappop(self.queue)
            if self.cached.get(key) != -use:
                continue
            now = self.next_use(key)
            del self.cached[key]
            if now != -use and now < NEVER:
                self.cached[key] = now
                heapq.heappush(self.queue, (-now, depth, key))

    def computed(self, job: Job) -> None:
        """Do nothing: blocks are published when they are freed."""

    def free(self, job: Job) -> None:
        """See :class:`Cache`."""
        self.num_running -= 1
        self.release(job, self.tables.pop(job.index), job.num_computed)
        self.shrink()


class OfVLLM:
    """vLLM's manager, used as its scheduler does; states are cached at the ends of chunks."""

    def __init__(self, trace: Trace, kinds: Sequence[str], jobs: Sequence[Job]) -> None:
        def of_vllm(module: str) -> Any:
            return importlib.import_module(f"vllm.{module}")

        spec = of_vllm("v1.kv_cache_interface")
        kv_cache_utils = of_vllm("v1.core.kv_cache_utils")
        sha256 = of_vllm("utils.hashing").sha256
        kv_cache_utils.init_none_hash(sha256)
        self.size = trace.block_size
        hasher = kv_cache_utils.get_request_block_hasher(self.size, sha256)
        page = {"block_size": self.size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}

        def group(kind: str) -> Any:
            match kind:
                case "full":
                    return spec.FullAttentionSpec(**page)
                case "mamba":
                    shape = (2 * self.size * 8,)
                    return spec.MambaSpec(
                        block_size=self.size,
                        shapes=(shape,),
                        dtypes=(torch.float32,),
                        mamba_cache_mode="align",
                    )
            return spec.SlidingWindowSpec(**page, sliding_window=trace.windows[kind == "wide"])

        groups = [spec.KVCacheGroupSpec([f"{kind}.0"], group(kind)) for kind in kinds]
        config = spec.KVCacheConfig(trace.num_pages + 1, [], groups)
        self.manager = of_vllm("v1.core.kv_cache_manager").KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=self.size,
            hash_block_size=self.size,
            max_in_flight_tokens=trace.chunk,
        )
        self.has_states = "mamba" in kinds

        def request(job: Job) -> Any:
            params = of_vllm("sampling_params").SamplingParams(max_tokens=1 << 20)
            return of_vllm("v1.request").Request(
                job.name, job.tokens[: job.num_prompt_tokens], params, None, block_hasher=hasher
            )

        self.requests = {job.index: request(job) for job in jobs}
        self.junctions: dict[int, int] = {}

    def clip(self, job: Job, start: int, num_tokens: int) -> int:
        """Clip a chunk like ``Scheduler._mamba_block_aligned_split``."""
        request = self.requests[job.index]
        prefill_end = max(job.num_prompt_tokens, job.num_known - 1)
        if not self.has_states or start >= prefill_end:
            return num_tokens
        end = start + num_tokens
        if end < prefill_end:
            end = end // self.size * self.size
        junction = self.junctions.get(job.index, 0)
        junction = start + (junction - start) // self.size * self.size
        stops: tuple[int, ...] = (
            (start // self.size + 1) * self.size if start % self.size else 0,
            request.num_tokens // self.size * self.size,
            junction,
        )
        return max(0, min((s for s in stops if start < s < end), default=end) - start)

    def admit(self, job: Job, chunk: int) -> int | None:
        """See :class:`Cache`."""
        request = self.requests[job.index]
        blocks, start, junction = self.manager.get_computed_blocks(request)
        self.junctions[job.index] = junction
        num_tokens = self.clip(job, start, min(chunk, job.num_known - start))
        if not num_tokens:
            return None
        new = self.manager.allocate_slots(
            request, num_tokens, start, blocks, full_sequence_must_fit=True
        )
        if new is None:
            return None
        request.num_computed_tokens = job.num_computed = start
        return job.num_computed + num_tokens

    def grow(self, job: Job, chunk: int) -> int | None:
        """See :class:`Cache`."""
        request = self.requests[job.index]
        if request.num_tokens < job.num_known:
            request.append_output_token_ids(job.tokens[request.num_tokens : job.num_known])
        request.num_computed_tokens = job.num_computed
        num_tokens = self.clip(job, job.num_computed, min(chunk, job.num_known - job.num_computed))
        new = self.manager.allocate_slots(request, num_tokens) if num_tokens else None
        return None if new is None else job.num_computed + num_tokens

    def computed(self, job: Job) -> None:
        """Start a new step: blocks are already published, and may be used in the next step."""
        self.manager.new_step_starts()

    def free(self, job: Job) -> None:
        """See :class:`Cache`."""
        self.manager.free(self.requests[job.index])
        self.requests[job.index].num_computed_tokens = 0


Side = Callable[[Trace, Sequence[str], Sequence[Job]], Cache]


def play(trace: Trace, kinds: Sequence[str], side: Side) -> list[Job]:
    """Run a trace to its end; return the jobs with their hits."""
    jobs = trace.new_jobs()
    cache = side(trace, kinds, jobs)
    waiting, running = deque(jobs), list[Job]()
    for job in jobs:
        job.num_known = job.num_prompt_tokens
    while waiting or running:
        ends: dict[Job, int] = {}
        preempted = False
        for job in tuple(running):
            while job in running and (end := cache.grow(job, trace.chunk)) is None:
                victim = running.pop()
                cache.free(victim)
                victim.num_computed = 0
                waiting.appendleft(victim)
                preempted = True
            if job in running and end is not None:
                ends[job] = end
        while waiting and not preempted and len(running) < trace.seats:
            job = waiting[0]
            first_end = cache.admit(job, trace.chunk)
            if first_end is None or first_end < 0:
                break
            if job.num_hit is None:
                job.num_hit = job.num_computed
            running.append(waiting.popleft())
            ends[job] = first_end
        if not ends:
            raise RuntimeError(f"{len(waiting)} jobs can never run in {trace.num_pages} pages")
        for job, end in ends.items():
            job.num_computed = end
            cache.computed(job)
            if end == job.num_known:
                job.num_known += 1
            if job.has_ended:
                running.remove(job)
                cache.free(job)
    return jobs


# Traces.


class Words:
    """Source of unique tokens."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.next = 0

    def new(self, count: int) -> list[int]:
        """Return ``count`` new words."""
        self.next += count
        return list(range(self.next - count, self.next))

    def about(self, count: int) -> list[int]:
        """Return about ``count`` new words, sometimes several times as many (log-normal)."""
        return self.new(max(1, round(self.random.lognormvariate(0, 0.6) * count)))


def random_trace(seed: int) -> Trace:
    """Create requests that begin with a random prefix of an earlier one."""
    words, jobs = Words(seed), list[tuple[list[int], list[int]]]()
    source = words.random
    for _ in range(130):
        begin: list[int] = []
        if jobs and source.random() < 0.75:
            prompt, output = source.choice(jobs[-40:])
            whole = prompt + output
            begin = whole[: source.randint(1, len(whole))][:160]
        prompt = begin + words.new(source.randint(1, 120))
        jobs.append((prompt, words.new(source.randint(1, 30))))
    return Trace(
        tuple(jobs), num_pages=160, block_size=4, seats=4, chunk=source.choice((16, 32, 64)),
        windows=(16, 48),
    )  # fmt: skip


def conversations(seed: int) -> Trace:
    """Create 40 concurrent conversations of about six turns; a new one follows each that ends."""
    words, jobs = Words(seed), list[tuple[list[int], list[int]]]()
    source, system = words.random, Words(seed).new(200)
    words.next = 200
    live = [list(system) for _ in range(40)]
    for _ in range(600):
        # The conversation that was active last is more likely to continue.
        index = min(int(source.expovariate(0.12)), len(live) - 1)
        talk = live.pop(index)
        prompt = talk + words.about(60)
        output = words.about(150)
        jobs.append((prompt, output))
        ends = source.random() < 1 / 6 or len(prompt) > 4000
        live.insert(0, list(system) if ends else prompt + output)
        if ends:
            live.append(live.pop(0))
    return Trace(tuple(jobs), num_pages=1500)


def system_prompts(seed: int) -> Trace:
    """Create short questions after one of 60 long system prompts of very unequal popularity."""
    words, jobs = Words(seed), list[tuple[list[int], list[int]]]()
    systems = [words.about(600) for _ in range(60)]
    weights = [1 / (rank + 1) for rank in range(60)]
    for _ in range(800):
        system = words.random.choices(systems, weights)[0]
        jobs.append((system + words.about(80), words.about(80)))
    return Trace(tuple(jobs), num_pages=1000)


def agents(seed: int) -> Trace:
    """Create tasks whose steps extend one another; some steps have several continuations."""
    words, jobs = Words(seed), list[tuple[list[int], list[int]]]()
    source = words.random
    tools = words.new(800)
    tasks: list[list[list[int]]] = []
    for _ in range(600):
        if len(tasks) < 10 or source.random() < 0.05:
            tasks.append([tools + words.about(150)])
            tasks = tasks[-14:]
        steps = source.choice(tasks)
        # Mostly from the newest step, sometimes from an earlier one.
        begin = steps[-1] if source.random() < 0.7 else source.choice(steps)
        prompt, output = begin + words.about(120), words.about(60)
        jobs.append((prompt, output))
        steps.append(prompt + output)
        if len(prompt) > 3500:
            tasks.remove(steps)
    return Trace(tuple(jobs), num_pages=1400)


def retrieval(seed: int) -> Trace:
    """Create prompts of an instruction, three of 80 documents in any order, and a question."""
    words, jobs = Words(seed), list[tuple[list[int], list[int]]]()
    instruction = words.new(160)
    documents = [words.about(250) for _ in range(80)]
    weights = [1 / (rank + 1) for rank in range(80)]
    for _ in range(800):
        chosen: list[int] = []
        while len(chosen) < 3:
            (pick,) = words.random.choices(range(80), weights)
            if pick not in chosen:
                chosen.append(pick)
        prompt = instruction + [t for pick in chosen for t in documents[pick]]
        jobs.append((prompt + words.about(30), words.about(60)))
    return Trace(tuple(jobs), num_pages=1000)


def scan(seed: int) -> Trace:
    """Create a hot set of half the pool, interrupted by one scan of ten times the pool."""
    words, jobs = Words(seed), list[tuple[list[int], list[int]]]()
    pages, size = 1000, 16
    hot = [words.new(400) for _ in range(pages * size // 2 // 400)]
    for begin in hot * 3:
        jobs.append((begin + words.new(20), words.new(10)))
    read = 0
    while read < 10 * pages * size:
        jobs.append((words.new(1500), words.new(10)))
        read += 1510
    for begin in hot:
        jobs.append((begin + words.new(20), words.new(10)))
    return Trace(tuple(jobs), num_pages=pages, seats=2)


def hot_and_scan(seed: int) -> Trace:
    """Create the same with a request of the hot set after every third text of the scan."""
    words, jobs = Words(seed), list[tuple[list[int], list[int]]]()
    hot = [words.new(400) for _ in range(20)]
    for index in range(500):
        if index % 4 == 3:
            jobs.append((words.random.choice(hot) + words.new(20), words.new(10)))
        else:
            jobs.append((words.about(700), words.new(10)))
    return Trace(tuple(jobs), num_pages=1000, seats=2)


REALISTIC: dict[str, Callable[[int], Trace]] = {
    "conversations": conversations,
    "system prompts": system_prompts,
    "agents' trees": agents,
    "shuffled documents": retrieval,
    "hot set in a scan": hot_and_scan,
    "hot set after a scan": scan,
}


def report(
    console: Console, title: str, rows: dict[str, tuple[list[Trace], Sequence[str]]],
    sides: dict[str, Side],
) -> None:  # fmt: skip
    table = Table(title=title)
    table.add_column("trace")
    names = list(sides)
    for column in ("prompt tokens", *names, f"{names[0]} / {names[1]}", f"{names[0]} / optimum"):
        table.add_column(column, justify="right")
    if "vLLM" in sides:
        table.add_column(f"{names[0]} / vLLM", justify="right")
    totals: Counter[str] = Counter()
    for name, (traces, kinds) in rows.items():
        hits: Counter[str] = Counter()
        for trace in traces:
            for side_name, side in sides.items():
                jobs = play(trace, kinds, side)
                hits[side_name] += sum(job.num_hit or 0 for job in jobs)
        totals.update(hits)
        num_tokens = sum(len(prompt) for trace in traces for prompt, _ in trace.jobs)
        table.add_row(name, f"{num_tokens:,}", *_figures(hits, names))
    table.add_section()
    table.add_row("all", "", *_figures(totals, names))
    console.print(table)


def _figures(hits: Counter[str], names: Sequence[str]) -> list[str]:
    ours = hits[names[0]]
    against = [names[1], "optimum", *(["vLLM"] if "vLLM" in names else [])]
    return [f"{hits[name]:,}" for name in names] + [
        f"{ours / hits[name]:.3f}" if hits[name] else "" for name in against
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=int, default=12, help="random ones of each kind")
    parser.add_argument("--only", default="", help="traces whose name contains this")
    parser.add_argument("--vllm", action="store_true", help="beside vLLM's manager")
    args = parser.parse_args()
    sides: dict[str, Side] = {"ours": Ours, "plain LRU": PlainLRU, "optimum": Clairvoyant}
    if args.vllm:
        sides["vLLM"] = OfVLLM
    console = Console(width=140)
    random_traces = [random_trace(seed) for seed in range(args.traces)]
    rows: dict[str, tuple[list[Trace], Sequence[str]]] = {
        name: (random_traces, kinds) for name, kinds in KINDS.items() if args.only in name
    }
    if rows:
        report(console, f"random traces, {args.traces} of a kind: tokens hit", rows, sides)
    rows = {
        f"{name}, {kind}": ([make(0)], KINDS[kind])
        for kind in ("full attention", "full + window", "full + Mamba")
        for name, make in REALISTIC.items()
        if args.only in f"{name}, {kind}"
    }
    if rows:
        report(console, "realistic traces: tokens hit", rows, sides)


if __name__ == "__main__":
    main()
