"""Step inputs against the design's worked example, and steps on a simulated CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, TokensPrompt
from engine.execution.input_batch import InputBatch, StepInputs
from engine.execution.model_runner import FilledPage, PageContents
from prefix_cache import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    PagedMemory,
)
from tests.support.model_trial import TRIALS
from tests.support.pretended_cuda import (
    BLOCKING_READ,
    BLOCKING_UPLOAD,
    READ,
    UPLOAD,
    WAIT,
    pretended_cuda,
)

MAX_MODEL_LEN = 12
BLOCK_SIZE = 2
# token T_r_c of the design is written as 100 * r + c here
PROMPTS = {"0": [0, 1, 2], "1": [100, 101], "2": [200 + c for c in range(8)]}


def make_batch() -> InputBatch:
    batch = InputBatch(max_num_seqs=4, max_model_len=MAX_MODEL_LEN, block_sizes=[BLOCK_SIZE])
    for request_id, prompt in PROMPTS.items():
        batch.add(request_id, prompt)
    for request_id, blocks in {"0": [1, 2], "1": [3], "2": [4, 5, 6]}.items():
        batch.append_blocks(request_id, blocks)
    return batch


def first_step(batch: InputBatch) -> StepInputs:
    return batch.prepare(["0", "1", "2"], [0, 0, 0], [3, 2, 5])


def test_first_step_matches_the_worked_numbers() -> None:
    step = first_step(make_batch())
    assert step.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]
    assert step.token_ids.tolist() == [0, 1, 2, 100, 101, 200, 201, 202, 203, 204]
    assert step.query_start_loc.tolist() == [0, 3, 5, 10]
    assert step.seq_lens.tolist() == [3, 2, 5]
    assert step.num_computed_tokens.tolist() == [0, 0, 0]
    (group,) = step.groups
    assert group.slot_mapping.tolist() == [2, 3, 4, 6, 7, 8, 9, 10, 11, 12]
    assert group.block_table.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]


def test_second_step_mixes_decodes_with_the_rest_of_a_chunked_prompt() -> None:
    batch = make_batch()
    first_step(batch)
    batch.append_token("0", 3)
    batch.append_token("1", 102)
    batch.append_blocks("1", [7])
    batch.append_blocks("2", [8])
    step = batch.prepare(["0", "1", "2"], [3, 2, 5], [1, 1, 3])
    assert step.positions.tolist() == [3, 2, 5, 6, 7]
    assert step.token_ids.tolist() == [3, 102, 205, 206, 207]
    assert step.query_start_loc.tolist() == [0, 1, 2, 5]
    assert step.seq_lens.tolist() == [4, 3, 8]
    assert step.num_computed_tokens.tolist() == [3, 2, 5]
    (group,) = step.groups
    assert group.slot_mapping.tolist() == [5, 14, 13, 16, 17]
    assert group.block_table.tolist() == [[1, 2, 0, 0], [3, 7, 0, 0], [4, 5, 6, 8]]


def test_a_freed_row_keeps_no_blocks() -> None:
    batch = make_batch()
    batch.remove("2")
    batch.add("3", [300])
    batch.append_blocks("3", [9])
    step = batch.prepare(["0", "3"], [0, 0], [3, 1])
    assert step.groups[0].block_table.tolist() == [[1, 2], [9, 0]]
    assert step.token_ids.tolist() == [0, 1, 2, 300]


def test_rows_are_conserved() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=4, block_sizes=[1])
    batch.add("a", [1])
    with pytest.raises(ValueError, match="already has a row"):
        batch.add("a", [1])
    with pytest.raises(ValueError, match="all 1 rows are taken"):
        batch.add("b", [1])
    batch.remove("a")
    batch.remove("a")
    batch.add("b", [1])
    assert "b" in batch and "a" not in batch


@given(
    shares=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    order=st.randoms(use_true_random=False),
)
def test_every_token_gets_its_own_slot(
    shares: list[tuple[int, int]], block_size: int, order: object
) -> None:
    """Compare with a loop over tokens."""
    batch = InputBatch(max_num_seqs=8, max_model_len=18, block_sizes=[block_size])
    next_block = 1
    tables: list[list[int]] = []
    for i, (computed, scheduled) in enumerate(shares):
        batch.add(str(i), [1000 * i + c for c in range(computed + scheduled)])
        count = -(-(computed + scheduled) // block_size)
        tables.append(list(range(next_block, next_block + count)))
        batch.append_blocks(str(i), tables[-1])
        next_block += count
    requests = list(range(len(shares)))
    order.shuffle(requests)  # type: ignore[attr-defined]
    step = batch.prepare(
        [str(i) for i in requests],
        [shares[i][0] for i in requests],
        [shares[i][1] for i in requests],
    )
    ids, slots, positions = [], [], []
    for i in requests:
        computed, scheduled = shares[i]
        for position in range(computed, computed + scheduled):
            ids.append(1000 * i + position)
            positions.append(position)
            slots.append(tables[i][position // block_size] * block_size + position % block_size)
    assert step.token_ids.tolist() == ids
    assert step.positions.tolist() == positions
    assert step.groups[0].slot_mapping.tolist() == slots
    assert len(np.unique(step.groups[0].slot_mapping)) == len(slots)


GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(
    max_tokens=4,
    temperature=0.8,
    top_p=0.9,
    top_k=20,
    seed=3,
    logprobs=2,
    ignore_eos=True,
    repetition_penalty=1.2,
)
# A decode of the second prompt fills a page.
CUDA_PROMPTS = tuple(TokensPrompt(tuple(range(5, 5 + length))) for length in (5, 14))


def run(
    engine: LLMEngine, params: SamplingParams, after_step: Callable[[], None] = lambda: None
) -> list[tuple[int, ...]]:
    for index, prompt in enumerate(CUDA_PROMPTS):
        engine.add_request(str(index), prompt, params)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        after_step()
    assert not any(output.error for output in done.values())
    return [done[str(index)].outputs[0].token_ids for index in range(len(CUDA_PROMPTS))]


@pytest.mark.parametrize(
    ("family", "params", "uploads", "reads"),
    [
        ("t5", GREEDY, 1, 1),
        # In addition to the step's: penalties, sampling parameters, shares, time orders of states,
        # and the numbers of tokens per expert in two float32 layers.
        ("jamba", DRAWN, 9, 3),
    ],
)
def test_decodes_on_cuda_wait_once_a_step_and_give_the_cpus_tokens(
    seeded: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    params: SamplingParams,
    uploads: int,
    reads: int,
):
    def config(device: str, backend: str) -> EngineConfig:
        return EngineConfig(
            model=seeded(family),
            dtype="float32",
            num_blocks=32,
            max_num_seqs=2,
            device=device,
            attention_backend=backend,
        )

    expected = run(LLMEngine(config("cpu", "torch")), params)
    with pretended_cuda(monkeypatch) as crossings:
        engine = LLMEngine(config("cuda:0", "auto"))
        assert engine.memory_plan.attention == "triton"
        steps: list[dict[str, int]] = []

        def after_step() -> None:
            kinds = (UPLOAD, BLOCKING_UPLOAD, READ, BLOCKING_READ, WAIT)
            steps.append({kind: crossings.count(kind) for kind in kinds})
            crossings.clear()

        crossings.clear()
        assert run(engine, params, after_step) == expected
    # The last step also reads the final blocks of finished requests.
    _, *decodes, _ = steps
    assert len(decodes) == 2
    for crossed in decodes:
        assert crossed[BLOCKING_UPLOAD] == 0
        # Waiting for the sampled tokens also covers the rows and other pending reads.
        assert crossed[BLOCKING_READ] == reads
        assert crossed[READ] <= 2
        assert crossed[WAIT] == 1
        assert crossed[UPLOAD] <= uploads


def test_keeping_alignment_heads_needs_no_blocking_upload(
    seeded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
):
    prompt = TRIALS["whisper"].prompt
    assert prompt is not None
    with pretended_cuda(monkeypatch) as crossings:
        engine = LLMEngine(
            EngineConfig(model=seeded("whisper"), dtype="float32", device="cuda:0", max_num_seqs=2)
        )
        assert engine._runner._aligned
        engine.add_request("0", prompt(), GREEDY)
        engine.step()
        crossings.clear()
        engine.step()
        assert crossings.count(BLOCKING_UPLOAD) == 0
        engine.abort("0")


def test_the_pretended_device_refuses_what_cuda_refuses(monkeypatch: pytest.MonkeyPatch):
    with pretended_cuda(monkeypatch) as crossings:
        there = torch.arange(4, device="cuda")
        with pytest.raises(RuntimeError, match="tensors on both devices"):
            there + torch.arange(4)
        with pytest.raises(RuntimeError, match=r"numpy\(\) of a tensor on CUDA"):
            there.numpy()
        assert there.device == torch.device("cuda:0")
        assert not crossings.count(BLOCKING_READ, BLOCKING_UPLOAD)
        assert (there + 1).sum().item() == 10
        assert there[there > 1].tolist() == [2, 3]
        assert crossings.count(BLOCKING_READ) == 3
        torch.arange(4).to("cuda", non_blocking=True)  # not pinned
        assert crossings.count(BLOCKING_UPLOAD) == 1
        torch.arange(4).pin_memory().to("cuda", non_blocking=True)
        assert crossings.count(UPLOAD) == 1


def test_a_group_without_filled_pages_gathers_nothing():
    groups = (
        KVCacheGroup(("decoder.self",), FullAttentionSpec(4, 2, 8, torch.float16)),
        KVCacheGroup(("decoder.cross",), CrossAttentionSpec(4, 2, 8, torch.float16)),
    )
    contents = PageContents(PagedMemory(KVCacheConfig(8, groups), "meta"))
    gathered = contents.numbers([FilledPage(0, 1, 3), FilledPage(0, 1, 5)])
    assert [each.shape[0] for each in gathered] == [2]
