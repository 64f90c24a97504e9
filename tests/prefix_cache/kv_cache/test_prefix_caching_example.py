"""The worked example of the omni prefix-caching design, number by number.

8 blocks of 4 tokens, hidden size 2, a tensor ``mm_feature`` of size 16, and two prompts that share
their first four words. The design draws its blocks from 0 on; here block 0 is the null block, so
its block 0 is our block 1, its row 0 our row 4, and so on: everything is shifted by one block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_cache import KVCacheManager, check_integrity
from tests.support.tiny_kv_cache import hashes_of, tiny_config

NUM_BLOCKS, BLOCK_SIZE, HIDDEN_SIZE, FEATURE_SIZE = 8, 4, 2, 16
FIRST_TEXT = "The quick brown fox was tired and slept beneath the shady tree"
SECOND_TEXT = "The quick brown fox jumped over the dog"
FIRST_PROMPT, SECOND_PROMPT = FIRST_TEXT.split(), SECOND_TEXT.split()
VOCABULARY = {word: index for index, word in enumerate(dict.fromkeys(FIRST_PROMPT + SECOND_PROMPT))}


def token_ids(words: list[str]) -> list[int]:
    return [VOCABULARY[word] for word in words]


def forward(words: list[str]) -> dict[str, Tensor]:
    """A causal model: row i is determined by the words up to i, and by nothing else."""
    causal_sums = torch.tensor(token_ids(words), dtype=torch.float64).cumsum(0).unsqueeze(1)
    return {
        "hidden_states": causal_sums * torch.tensor([1.0, -1.0], dtype=torch.float64),
        "mm_feature": causal_sums + torch.arange(FEATURE_SIZE, dtype=torch.float64),
    }


def run(
    manager: KVCacheManager, request_id: str, words: list[str]
) -> tuple[int, dict[str, Tensor]]:
    """One request from its admission to its outputs: the number of cached tokens, all rows."""
    ids = token_ids(words)
    hashes = hashes_of(ids, BLOCK_SIZE)
    prefix = manager.find_cached_prefix(hashes, len(ids))
    assert manager.allocate_slots(request_id, len(ids), prefix=prefix, block_hashes=hashes)
    block_table = torch.tensor(manager.block_ids(request_id))
    positions = torch.arange(prefix.num_tokens, len(ids))
    slot_mapping = block_table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    new_rows = {name: rows[positions] for name, rows in forward(words).items()}
    manager.stage_outputs.write(slot_mapping, new_rows)
    manager.publish(request_id, hashes, len(ids))
    return prefix.num_tokens, manager.gather_outputs(request_id, len(ids))


def test_the_quick_brown_fox():
    manager = KVCacheManager(tiny_config(NUM_BLOCKS, BLOCK_SIZE))
    assert (len(FIRST_PROMPT), len(SECOND_PROMPT)) == (12, 8)

    # First prompt: 12 tokens, three blocks, nothing cached, both tensors discovered.
    num_cached, outputs = run(manager, "first", FIRST_PROMPT)
    assert num_cached == 0
    assert manager.block_ids("first") == [1, 2, 3]
    assert manager.stage_outputs.shapes == {
        "hidden_states": (NUM_BLOCKS, BLOCK_SIZE, HIDDEN_SIZE),
        "mm_feature": (NUM_BLOCKS, BLOCK_SIZE, FEATURE_SIZE),
    }
    # Flattened: rows 4 to 15 are "The" to "tree", in order.
    expected = forward(FIRST_PROMPT)
    whole_store = manager.stage_outputs.gather([1, 2, 3], 12)
    for row, word in enumerate(FIRST_PROMPT):
        block_id, offset = 1 + row // BLOCK_SIZE, row % BLOCK_SIZE
        one_row = manager.stage_outputs.gather([block_id], offset + 1, start=offset)
        for name in ("hidden_states", "mm_feature"):
            assert torch.equal(one_row[name][0], expected[name][row]), word
            assert torch.equal(whole_store[name][row], expected[name][row]), word
    assert outputs["hidden_states"].shape == (12, HIDDEN_SIZE)
    assert outputs["mm_feature"].shape == (12, FEATURE_SIZE)
    assert manager.stage_outputs.gather([4], 1) == {}, "the next block is empty"
    manager.free("first")

    # Second prompt: "The quick brown fox" is there, four tokens are new, in one new block.
    num_cached, outputs = run(manager, "second", SECOND_PROMPT)
    assert num_cached == 4
    assert manager.block_ids("second") == [1, 4]
    new_rows = manager.stage_outputs.gather([4], 4)
    assert torch.equal(new_rows["mm_feature"], forward(SECOND_PROMPT)["mm_feature"][4:])
    manager.free("second")
    check_integrity(manager)
    assert manager.stats().cached == 4 and manager.stats().free == 3

    # The full-length output is what a run without the cache gives.
    uncached = KVCacheManager(tiny_config(NUM_BLOCKS, BLOCK_SIZE), enable_prefix_caching=False)
    run(uncached, "first", FIRST_PROMPT)
    num_cached, uncached_outputs = run(uncached, "second", SECOND_PROMPT)
    assert num_cached == 0
    assert outputs.keys() == uncached_outputs.keys() == {"hidden_states", "mm_feature"}
    for name, rows in outputs.items():
        assert torch.equal(rows, uncached_outputs[name])
        assert torch.equal(rows, forward(SECOND_PROMPT)[name])


def test_an_image_that_ends_inside_a_block_is_hit_up_to_the_last_full_block():
    # [Im0 Im1 Im2 Im3] [Im4 Im5 foo] and then [Im0 Im1 Im2 Im3] [Im4 Im5 bar baz]
    manager = KVCacheManager(tiny_config(NUM_BLOCKS, BLOCK_SIZE))
    image = ["The"] * 6
    run(manager, "first", [*image, "quick"])
    manager.free("first")
    num_cached, outputs = run(manager, "second", [*image, "brown", "fox"])
    assert num_cached == 4
    expected = forward([*image, "brown", "fox"])
    assert torch.equal(outputs["hidden_states"], expected["hidden_states"])
