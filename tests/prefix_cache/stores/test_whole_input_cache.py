"""Bidirectional encoders: an input is found as a whole, with all its rows, or not at all."""

from __future__ import annotations

import pytest
import torch

from prefix_cache import (
    BlockPool,
    StageOutputCache,
    WholeInputCache,
    check_pool_integrity,
    whole_input_hash,
)

BLOCK_SIZE = 4
INPUT = [5, 6, 7, 8, 9, 10]


def new_cache(num_blocks: int = 6) -> WholeInputCache:
    pool = BlockPool.uniform(num_blocks)
    outputs = StageOutputCache(num_blocks, BLOCK_SIZE, pool.generations(0))
    return WholeInputCache(pool, outputs, BLOCK_SIZE)


def write(cache: WholeInputCache, blocks, num_tokens: int, value: float, name: str = "h") -> None:
    slots = [
        blocks[p // BLOCK_SIZE].block_id * BLOCK_SIZE + p % BLOCK_SIZE for p in range(num_tokens)
    ]
    cache.stage_outputs.write(torch.tensor(slots), {name: torch.full((num_tokens, 2), value)})


def encode(cache: WholeInputCache, token_ids, value: float) -> None:
    blocks = cache.allocate(len(token_ids))
    write(cache, blocks, len(token_ids), value)
    cache.publish(whole_input_hash(token_ids), len(token_ids), blocks)
    cache.release(blocks)


def find(cache: WholeInputCache, token_ids):
    return cache.find(whole_input_hash(token_ids), len(token_ids))


def test_an_input_is_found_again_with_its_rows_partial_block_included():
    cache = new_cache()
    assert find(cache, INPUT) is None
    encode(cache, INPUT, 1.0)
    blocks = find(cache, INPUT)
    assert blocks is not None and len(blocks) == 2
    check_pool_integrity(cache.pool, [blocks])
    ids = [block.block_id for block in blocks]
    assert torch.equal(cache.stage_outputs.gather(ids, 6)["h"], torch.ones(6, 2))
    cache.release(blocks)
    check_pool_integrity(cache.pool, [])


@pytest.mark.parametrize("other", [INPUT[:4], INPUT[:5], [*INPUT, 11], [*INPUT[:5], 0]])
def test_a_shared_prefix_is_no_hit(other):
    cache = new_cache()
    encode(cache, INPUT, 1.0)
    assert find(cache, other) is None


def test_an_input_of_which_a_block_was_evicted_is_not_found():
    cache = new_cache(num_blocks=4)
    encode(cache, INPUT, 1.0)
    encode(cache, [1] * 8, 2.0)  # takes one free block and one of the input's
    assert len(cache.pool.hash_tables[0]) == 3
    assert find(cache, INPUT) is None
    check_pool_integrity(cache.pool, [])
    encode(cache, INPUT, 3.0)
    assert find(cache, INPUT) is not None


def test_an_input_without_rows_of_a_wanted_tensor_is_not_found():
    cache = new_cache()
    encode(cache, INPUT, 1.0)
    other = cache.allocate(1)
    write(cache, other, 1, 1.0, name="k")
    assert find(cache, INPUT) is None
    check_pool_integrity(cache.pool, [other])


def test_rows_are_wanted_up_to_the_last_token():
    cache = new_cache()
    blocks = cache.allocate(6)
    write(cache, blocks, 5, 1.0)
    cache.publish(whole_input_hash(INPUT), 6, blocks)
    cache.release(blocks)
    assert find(cache, INPUT) is None


def test_capacity_errors_say_what_is_needed_and_what_is_there():
    cache = new_cache(num_blocks=4)
    with pytest.raises(ValueError, match="length 13 needs 4 blocks of 4, 3 are free now"):
        cache.allocate(13)
    held = cache.allocate(5)
    with pytest.raises(ValueError, match="length 8 needs 2 blocks of 4, 1 are free now"):
        cache.allocate(8)
    with pytest.raises(ValueError, match="length of at least 1, got 0"):
        cache.allocate(0)
    with pytest.raises(ValueError, match="takes 3 blocks, got 2"):
        cache.publish(whole_input_hash(INPUT), 12, held)
    check_pool_integrity(cache.pool, [held])
