"""Cost of the stage-output cache, compared with the plain torch calls that it needs at least.

Two measurements, both sides in the same process, alternating, so that noise affects both::

    write    64 requests decode one token each; three tensors of (64, 2048) bf16 are mirrored,
             compared with three plain index_copy_ into stores of the same size
    gather   rows of a prefix hit of 2,032 tokens are returned, (2032, 2048) bf16,
             compared with one plain index_select of the same rows

Run it with ``python benchmarks/stage_output_cache.py``. It exits with status 1 if a limit is
missed: a write takes at most 1 ms and at most twice the plain copies; a gather runs at least at
half the speed of the plain select.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from prefix_cache import BlockPool, StageOutputCache

NUM_BLOCKS = 1024
BLOCK_SIZE = 16
WIDTH = 2048
NUM_REQUESTS = 64
HIT_TOKENS = 2032
NAMES = ("hidden_states", "codec", "embeddings")

MAX_WRITE_MS = 1.0
MAX_WRITE_RATIO = 2.0
MAX_GATHER_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Median milliseconds of both sides, measured alternating."""

    name: str
    cache_ms: float
    plain_ms: float

    @property
    def ratio(self) -> float:
        """Time of the cache relative to the plain calls."""
        return self.cache_ms / self.plain_ms


def compare(
    name: str, cache: Callable[[], object], plain: Callable[[], object], repeats: int
) -> Comparison:
    """Time two callables alternating; the first tenth is warm-up and not counted."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + repeats // 10):
        for side, run in zip(times, (cache, plain), strict=True):
            started = time.perf_counter()
            run()
            side.append((time.perf_counter() - started) * 1e3)
    counted = [statistics.median(side[repeats // 10 :]) for side in times]
    return Comparison(name, *counted)


def scattered_blocks(pool: BlockPool, num_blocks: int) -> list[int]:
    """Allocate blocks in random order, like a pool after an hour of work."""
    ids = [block.block_id for block in pool.allocate({0: num_blocks})[0]]
    random.Random(0).shuffle(ids)
    return ids


def slots_of(block_ids: list[int]) -> Tensor:
    """Return every slot of the blocks in order, ``(len(block_ids) * BLOCK_SIZE,)``."""
    return (torch.tensor(block_ids)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).view(-1)


def measure_write(repeats: int) -> Comparison:
    """Measure one decode step of 64 requests, each in a separate block."""
    pool = BlockPool.uniform(NUM_BLOCKS)
    cache = StageOutputCache(NUM_BLOCKS, BLOCK_SIZE, pool.generations(0))
    blocks = torch.tensor(scattered_blocks(pool, NUM_REQUESTS))
    slots = blocks * BLOCK_SIZE + torch.arange(NUM_REQUESTS) % BLOCK_SIZE
    tensors = {name: torch.randn(NUM_REQUESTS, WIDTH).bfloat16() for name in NAMES}
    stores = {name: torch.zeros(NUM_BLOCKS * BLOCK_SIZE, WIDTH).bfloat16() for name in NAMES}

    def plain() -> None:
        for name, rows in tensors.items():
            stores[name].index_copy_(0, slots, rows)

    return compare("write, 64 x 3", lambda: cache.write(slots, tensors), plain, repeats)


def measure_gather(repeats: int) -> Comparison:
    """Measure a hit whose rows were written block by block by earlier requests."""
    pool = BlockPool.uniform(NUM_BLOCKS)
    cache = StageOutputCache(NUM_BLOCKS, BLOCK_SIZE, pool.generations(0))
    block_ids = scattered_blocks(pool, -(-HIT_TOKENS // BLOCK_SIZE))
    slots = slots_of(block_ids)
    rows = torch.randn(len(slots), WIDTH).bfloat16()
    cache.write(slots, {"hidden_states": rows})
    store = torch.zeros(NUM_BLOCKS * BLOCK_SIZE, WIDTH).bfloat16()
    store[slots] = rows
    wanted = slots[:HIT_TOKENS]
    gathered = cache.gather(block_ids, HIT_TOKENS)["hidden_states"]
    if not torch.equal(gathered, store.index_select(0, wanted)):
        raise RuntimeError("the two sides do not give the same rows")
    return compare(
        f"gather, {HIT_TOKENS} rows",
        lambda: cache.gather(block_ids, HIT_TOKENS),
        lambda: store.index_select(0, wanted),
        repeats,
    )


def main() -> int:
    """Measure, print, and return 1 if a limit is missed."""
    write, gather = measure_write(repeats=300), measure_gather(repeats=60)
    table = Table(title=f"D = {WIDTH}, bf16, {torch.get_num_threads()} threads")
    for column in ("", "cache, ms", "plain, ms", "ratio", "limit"):
        table.add_column(column, justify="right" if column else "left")
    for result, limit in ((write, MAX_WRITE_RATIO), (gather, MAX_GATHER_RATIO)):
        table.add_row(
            result.name,
            f"{result.cache_ms:.3f}",
            f"{result.plain_ms:.3f}",
            f"{result.ratio:.2f}",
            f"{limit:.2f}",
        )
    Console().print(table)
    kept = (
        write.cache_ms <= MAX_WRITE_MS
        and write.ratio <= MAX_WRITE_RATIO
        and gather.ratio <= MAX_GATHER_RATIO
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
