"""What a step puts out costs what is new: counted, not timed, over requests that grow long."""

from __future__ import annotations

from typing import Any

import pytest

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, TokensPrompt
from engine.interface.outputs import OutputDelta
from engine.requests.request import Request
from engine.text.stop_checker import StopStrings
from prefix_cache import SingleTypeKVCacheManager
from stages.stage_output import OutputAccumulator

NUM_TOKENS = 300
PROMPT = TokensPrompt(tuple(range(50, 170)))
LONG = SamplingParams(
    temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, stop=("never said",)
)


class CountingList(list[Any]):
    """Counts the items that are copied out of it."""

    num_copied = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        CountingList.num_copied += len(found) if isinstance(index, slice) else 0
        return found

    def __iter__(self) -> Any:
        CountingList.num_copied += len(self)
        return super().__iter__()


@pytest.fixture(scope="module")
def engine(qwen2_checkpoint: str) -> LLMEngine:
    return LLMEngine(EngineConfig(model=qwen2_checkpoint, block_size=4, max_num_seqs=4))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[CountingList]:
    """Tokens and log-probabilities of requests from now on are counted when they are copied."""
    init = Request.__init__

    def counting(self: Request, *args: Any, **fields: Any) -> None:
        init(self, *args, **fields)
        self.token_ids = CountingList(self.token_ids)
        self.logprobs = CountingList(self.logprobs)

    monkeypatch.setattr(Request, "__init__", counting)
    CountingList.num_copied = 0
    return CountingList


def run(engine: LLMEngine, params: SamplingParams) -> list[OutputDelta]:
    engine.add_request("r", PROMPT, params)
    deltas: list[OutputDelta] = []
    while engine.has_unfinished_requests:
        deltas += engine.step_deltas()
    return deltas


def test_steps_copy_no_more_of_a_long_request_than_of_a_short_one(
    engine: LLMEngine, counted: type[CountingList]
) -> None:
    deltas = run(engine, LONG)
    num_all = len(PROMPT.prompt_token_ids) + NUM_TOKENS
    # The prompt for the tables and for its output, and every token once for its block's hash.
    assert counted.num_copied <= 4 * num_all
    assert [len(delta.token_ids) for delta in deltas] == [1] * NUM_TOKENS
    assert [len(delta.logprobs or ()) for delta in deltas] == [1] * NUM_TOKENS


@pytest.mark.parametrize("n", [1, 3])
def test_deltas_add_up_to_the_cumulative_outputs(engine: LLMEngine, n: int) -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, n=n, max_tokens=20, ignore_eos=True, logprobs=2, stop=("e",)
    )
    deltas = run(engine, params)
    engine.add_request("r", PROMPT, params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    accumulator = OutputAccumulator("r", "s")
    for delta, output in zip(deltas, outputs, strict=True):
        accumulator.add(delta)
        so_far = accumulator.output()
        assert so_far.delta == output.outputs[0].delta
        for ours, theirs in zip(so_far.completions, output.outputs, strict=True):
            assert ours.text == theirs.text and ours.token_ids == theirs.token_ids
            assert (ours.logprobs, ours.finish_reason) == (theirs.logprobs, theirs.finish_reason)
    assert so_far.finished and so_far.prompt_token_ids == outputs[-1].prompt_token_ids
    assert so_far.tensors.keys() == outputs[-1].outputs[0].tensors.keys()


def test_stop_strings_are_looked_for_in_the_new_text_alone(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    find = StopStrings.find

    def noting(self: StopStrings, text: str, num_passed: int) -> int | None:
        lengths.append(len(text))
        return find(self, text, num_passed)

    monkeypatch.setattr(StopStrings, "find", noting)
    text = "".join(delta.text or "" for delta in run(engine, LONG))
    assert len(text) > NUM_TOKENS and len(lengths) >= NUM_TOKENS
    assert sum(lengths) < len(text) + len(lengths) * len("never said")


def test_block_tables_are_read_from_the_new_blocks_on(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read: list[int] = []
    block_ids = SingleTypeKVCacheManager.block_ids

    def noting(self: SingleTypeKVCacheManager, *args: Any) -> list[int]:
        num_read.append(len(block_ids(self, *args)))
        return block_ids(self, *args)

    monkeypatch.setattr(SingleTypeKVCacheManager, "block_ids", noting)
    engine.add_request("r", PROMPT, LONG)
    num_rows = 0
    while engine.has_unfinished_requests:
        engine.step()
        if engine.has_unfinished_requests:
            rows = engine.partial_outputs("r", num_rows).get("hidden_states", ())
            num_rows += len(rows)
    num_blocks = (len(PROMPT.prompt_token_ids) + NUM_TOKENS) // 4
    assert num_rows >= 4 * num_blocks - 4
    # For the tables, for the rows of every step, and for all rows in the end.
    assert sum(num_read) <= 3 * num_blocks + 2 * NUM_TOKENS
