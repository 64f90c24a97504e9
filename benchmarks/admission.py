"""Time that a request spends in the prefix cache, without a model.

Run it from a checkout::

    python -m benchmarks.admission                     # prompts of 16, 256 and 2048 tokens
    python -m benchmarks.admission --num-tokens 256

A pool of 16-token blocks and one group of full attention, without mirrored rows. Requests run one
after the other: prompts that share nothing, or one that is completely cached. The output shows the
minimum of several rounds, in microseconds per request. ``admission`` is hashing, finding and
allocating together.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

import torch

from prefix_cache import (
    BlockHash,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    extend_block_hashes,
)

BLOCK_SIZE = 16
NUM_BLOCKS = 8192
ROUNDS = 15
REQUESTS = 100


def new_manager() -> KVCacheManager:
    """Create a manager of one group."""
    spec = FullAttentionSpec(BLOCK_SIZE, 8, 64, torch.float16)
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(("layer",), spec),))
    return KVCacheManager(config, output_names=())


def run_requests(prompts: list[list[int]], spent: dict[str, float]) -> None:
    """Admit and free requests one by one, in a pool that caches the earlier ones."""
    manager = new_manager()
    clock = time.perf_counter
    for index, prompt in enumerate(prompts):
        request_id, num_tokens = f"r{index}", len(prompt)
        times = [clock()]
        hashes: list[BlockHash] = []
        extend_block_hashes(hashes, prompt, BLOCK_SIZE)
        times.append(clock())
        prefix = manager.find_cached_prefix(hashes, num_tokens)
        times.append(clock())
        assert manager.can_finish(num_tokens, prefix=prefix)
        assert manager.allocate_slots(
            request_id,
            num_tokens,
            num_computed_tokens=prefix.num_tokens,
            prefix=prefix,
            block_hashes=hashes,
        )
        times.append(clock())
        manager.publish(request_id, hashes, num_tokens)
        times.append(clock())
        manager.free(request_id)
        times.append(clock())
        parts = ("hash", "find", "allocate", "publish", "free")
        for name, start, end in zip(parts, times[:-1], times[1:], strict=True):
            spent[name] += (end - start) / len(prompts) * 1e6


def measure(num_tokens: int, *, cached: bool) -> dict[str, float]:
    """Measure microseconds of each part per request, the minimum of several rounds."""
    prompts = [
        [(0 if cached else index) * num_tokens + place for place in range(num_tokens)]
        for index in range(REQUESTS)
    ]
    least: dict[str, float] = {}
    for _ in range(ROUNDS):
        spent: dict[str, float] = defaultdict(float)
        run_requests(prompts, spent)
        least = {name: min(value, least.get(name, value)) for name, value in spent.items()}
    return least


def main() -> None:
    """Print a row for each kind of prompt."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-tokens", type=int, nargs="*", default=[16, 256, 2048])
    for num_tokens in parser.parse_args().num_tokens:
        for cached in (False, True):
            parts = measure(num_tokens, cached=cached)
            admission = parts["hash"] + parts["find"] + parts["allocate"]
            row = "".join(f"{name} {value:7.1f}  " for name, value in parts.items())
            kind = "cached" if cached else "new"
            print(f"{num_tokens:>5} tokens, {kind:<7} {row} admission {admission:7.1f} us")


if __name__ == "__main__":
    main()
