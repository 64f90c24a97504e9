"""Keys of rows: equal for equal content, whoever computed it; and a talker goes by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from tests.support.speech import made_up

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
TALK = tuple(range(20, 30))


def keys_of(engine: LLMEngine, ids: tuple[int, ...], salt: str | None = None) -> Tensor:
    """By whole outputs, which are those that chunks come to."""
    engine.add_request("asks", TokensPrompt(ids), GREEDY, cache_salt=salt)
    chunks: list[Tensor] = []
    while True:
        for output in engine.step():
            if output.finished:
                keys = output.outputs[0].tensors["row_keys"]
                assert torch.equal(torch.cat(chunks), keys[: sum(map(len, chunks))])
                assert keys.shape == (output.num_prompt_tokens + 5, 6)
                return keys
        num_rows = sum(map(len, chunks))
        rows = engine.partial_outputs("asks", num_rows, ["hidden_states", "row_keys"])
        if rows:
            assert len(rows["row_keys"]) == len(rows["hidden_states"])
            chunks.append(rows["row_keys"])


def test_blocks_of_a_prompt_have_the_same_keys_until_all_is_forgotten(
    seeded: Callable[[str], str],
) -> None:
    engine = LLMEngine(
        EngineConfig(
            model=seeded("qwen2"),
            block_size=BLOCK_SIZE,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=4,
        ),
        output_names=["hidden_states", "row_keys"],
    )
    first = keys_of(engine, TALK)
    assert first[:8].any(dim=1).all() and not first[8:].any()
    assert torch.equal(first[0], first[3]) and not torch.equal(first[3], first[4])
    longer = keys_of(engine, (*TALK, 40, 41, 42, 43))
    assert torch.equal(longer[:8], first[:8]) and longer[8:12].any(dim=1).all()
    engine._kv.reset_prefix_cache()  # as if all were evicted: the rows are computed again
    assert torch.equal(keys_of(engine, TALK), first)
    assert not torch.equal(keys_of(engine, (9, *TALK[1:]))[:4], first[:4])
    assert not torch.equal(keys_of(engine, TALK, "another")[:4], first[:4])
    engine.reset_prefix_cache()  # as for new weights
    assert not torch.equal(keys_of(engine, TALK)[:4], first[:4])


def test_rows_with_the_same_keys_are_hit_although_they_are_rounded_otherwise(
    seeded: Callable[[str], str],
) -> None:
    engine = LLMEngine(
        EngineConfig(
            model=seeded("qwen2_5_omni"), part="talker", block_size=BLOCK_SIZE, max_model_len=40
        )
    )
    keys = torch.arange(1, 4).repeat_interleave(4).reshape(-1, 1).repeat(1, 6)
    keys = torch.cat([keys, torch.zeros(2, 6, dtype=torch.int64)])
    prompt = made_up(3, 14, 4)
    rounded = replace(prompt, prompt_rows=prompt.prompt_rows * (1 + 1e-6))
    hits = []
    for asked in (
        replace(prompt, prompt_keys=keys),
        replace(rounded, prompt_keys=keys),
        replace(rounded, prompt_keys=keys + (keys > 2).long()),  # the third block is another
        rounded,
    ):
        (output,) = engine.generate([asked], [GREEDY])
        hits.append(output.num_cached_tokens)
    assert hits == [0, 12, 8, 0]
