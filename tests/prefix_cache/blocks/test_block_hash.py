"""Promise 5: a block's hash covers everything that determines its content, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache import BlockHash, ContentSpan, content_hash, extend_block_hashes, whole_input_hash

TOKENS = list(range(100, 112))


def block_hashes(token_ids, block_size=4, **kwargs) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, token_ids, block_size, **kwargs)
    return hashes


def image(offset: int, length: int = 6, content: bytes = b"i" * 32, kind: str = "image"):
    return ContentSpan(kind, offset, length, content)


def test_only_full_blocks_are_hashed():
    assert [len(block_hashes(TOKENS[:n])) for n in (0, 3, 4, 7, 8, 12)] == [0, 0, 1, 1, 2, 3]
    assert all(len(digest) == 32 for digest in block_hashes(TOKENS))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.integers(1, 5), st.data())
def test_extending_step_by_step_equals_hashing_at_once(token_ids, block_size, data):
    steps = block_hashes([])
    length = 0
    while length < len(token_ids):
        length = data.draw(st.integers(length + 1, len(token_ids)))
        extend_block_hashes(steps, token_ids[:length], block_size)
    assert steps == block_hashes(token_ids, block_size)
    assert len(set(steps)) == len(steps)


def test_lists_and_arrays_of_any_integer_type_hash_alike():
    expected = block_hashes(TOKENS)
    assert block_hashes(tuple(TOKENS)) == expected
    assert block_hashes(np.array(TOKENS, dtype=np.int32)) == expected
    assert block_hashes(np.array(TOKENS, dtype=np.int64)) == expected


def test_a_changed_token_changes_its_block_and_all_after_it():
    base = block_hashes(TOKENS)
    changed = block_hashes([*TOKENS[:5], 7, *TOKENS[6:]])
    assert changed[0] == base[0]
    assert not set(changed[1:]) & set(base)


def test_equal_blocks_after_different_prefixes_differ():
    twice = block_hashes(TOKENS[:4] * 2)
    assert twice[0] != twice[1]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"salt": "a"}, {}),
        ({"salt": "a"}, {"salt": "b"}),
        ({"salt": ""}, {}),
        ({"lora_name": "a"}, {}),
        ({"lora_name": "a"}, {"salt": "a"}),
        ({"salt": "a", "lora_name": "b"}, {"salt": "b", "lora_name": "a"}),
        ({"salt": "ab", "lora_name": "c"}, {"salt": "a", "lora_name": "bc"}),
    ],
)
def test_salt_and_lora_separate_every_block(left, right):
    assert not set(block_hashes(TOKENS, **left)) & set(block_hashes(TOKENS, **right))
    assert block_hashes(TOKENS, **left) == block_hashes(TOKENS, **left)


@pytest.mark.parametrize(
    "other", [image(0, content=b"j" * 32), image(0, kind="audio"), image(1), image(0, length=5)]
)
def test_a_span_is_hashed_with_content_kind_position_and_length(other):
    with_image = block_hashes(TOKENS, spans=[image(0)])
    assert not set(with_image) & set(block_hashes(TOKENS))
    assert not set(with_image) & set(block_hashes(TOKENS, spans=[other]))


def test_a_span_changes_hashes_from_the_first_block_it_overlaps():
    base = block_hashes(TOKENS)
    late = block_hashes(TOKENS, spans=[image(4, length=2)])
    assert late[0] == base[0]
    assert not set(late[1:]) & set(base)
    # This span begins where the twelve tokens end and overlaps none of them.
    assert block_hashes(TOKENS, spans=[image(12)]) == base


def test_parts_of_one_image_under_equal_tokens_differ():
    # The placeholder ids are equal in both blocks. The parent hash does not distinguish them:
    # the second block of one request is compared with the first block of another.
    first_half, second_half = block_hashes([9] * 8, spans=[image(0, length=8)])
    shifted = block_hashes([9] * 8, spans=[image(4, length=4)])
    assert len({first_half, second_half, *shifted}) == 4


def test_the_order_of_spans_does_not_change_hashes():
    spans = [image(0, 2), image(2, 3, b"k" * 32), image(7, 2, kind="audio")]
    assert block_hashes(TOKENS, spans=spans) == block_hashes(TOKENS, spans=spans[::-1])


def test_token_ids_under_a_span_are_hashed():
    spans = [image(0, length=4)]
    assert block_hashes([1] * 4, spans=spans) != block_hashes([2] * 4, spans=spans)


def test_fields_cannot_run_into_each_other():
    one = [ContentSpan("image", 0, 4, b"xy")]
    other = [ContentSpan("imagex", 0, 4, b"y")]
    assert block_hashes(TOKENS, spans=one) != block_hashes(TOKENS, spans=other)


def test_whole_input_hash_counts_every_token_and_the_length():
    assert whole_input_hash(TOKENS) == whole_input_hash(list(TOKENS))
    variants = [TOKENS, TOKENS[:-1], [*TOKENS[:-1], 0], [*TOKENS, 0]]
    digests = {whole_input_hash(tokens) for tokens in variants}
    digests.add(whole_input_hash(TOKENS, salt="a"))
    digests.add(whole_input_hash(TOKENS, spans=[image(0)]))
    assert len(digests) == 6
    with pytest.raises(ValueError, match="empty input"):
        whole_input_hash([])


def test_content_hash_is_over_type_shape_and_bytes():
    data = torch.arange(12, dtype=torch.float32).view(3, 4)
    others = [data.view(4, 3), data.view(-1), data.to(torch.bfloat16), data + 1, data.double()]
    assert len({content_hash(t) for t in [data, *others]}) == 6
    assert content_hash(data) == content_hash(data.clone().requires_grad_())
    # The same values in another memory layout.
    assert content_hash(data.t().contiguous().t()) == content_hash(data)
    # Equal bytes of another type.
    assert content_hash(data.view(torch.int32)) != content_hash(data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3)])
def test_content_hash_accepts_any_type_and_shape(dtype, shape):
    assert len(content_hash(torch.zeros(shape, dtype=dtype))) == 32


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        block_hashes(TOKENS, block_size=0)
    hashes = block_hashes(TOKENS)
    with pytest.raises(ValueError, match="3 block hashes for 8 tokens, which fill only 2"):
        extend_block_hashes(hashes, TOKENS[:8], 4)
    with pytest.raises(ValueError, match="before position 0, got -1"):
        image(-1)
    with pytest.raises(ValueError, match="at least one token, got 0"):
        image(0, length=0)
