"""What a step puts out costs what is new: counted, not timed, over requests that grow long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, TokensPrompt
from engine.interface.deferred import Deferred, as_stored
from engine.requests.request import Request
from engine.text.stop_checker import StopStrings
from omni import AutoregressiveStage, Omni, OmniRequest, Pipeline
from prefix_cache import SingleTypeKVCacheManager

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


def run(engine: LLMEngine, params: SamplingParams) -> list[RequestOutput]:
    engine.add_request("r", PROMPT, params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    return outputs


def test_steps_copy_no_more_of_a_long_request_than_of_a_short_one(
    engine: LLMEngine, counted: type[CountingList]
) -> None:
    outputs = run(engine, LONG)
    num_all = len(PROMPT.prompt_token_ids) + NUM_TOKENS
    # The prompt for the tables and for its output, and every token once for its block's hash.
    assert counted.num_copied <= 4 * num_all
    assert len(outputs) == NUM_TOKENS
    assert all(output.prompt_token_ids is outputs[0].prompt_token_ids for output in outputs)
    last = outputs[-1].outputs[0]
    for count, output in enumerate(outputs, start=1):
        (told,) = output.outputs
        assert told.token_ids == last.token_ids[:count]
        assert told.logprobs == (last.logprobs or ())[:count]
        assert told.text == "".join(each.outputs[0].delta for each in outputs[:count])


def test_stop_strings_are_looked_for_in_the_new_text_alone(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    find = StopStrings.find

    def noting(self: StopStrings, text: str, num_passed: int) -> int | None:
        lengths.append(len(text))
        return find(self, text, num_passed)

    monkeypatch.setattr(StopStrings, "find", noting)
    text = run(engine, LONG)[-1].outputs[0].text
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


def test_a_pipeline_hands_on_what_nobody_asked_for_unmade(seeded: Callable[[str], str]) -> None:
    """Through the stage, and what the caller has not taken of it yet."""
    config = EngineConfig(model=seeded("qwen2"), num_blocks=64, block_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    stage = AutoregressiveStage("s", config, sampling=params, final_output=["text"])
    with Omni(Pipeline([stage])) as omni:
        outputs = [output.stages["s"] for output in omni.stream(OmniRequest(PROMPT))]
    assert len(outputs) > 10
    for output in outputs[:-1]:
        for name in ("text", "token_ids", "completions"):
            assert isinstance(as_stored(output, name), Deferred)
    last = outputs[-1]
    assert "".join(output.delta for output in outputs) == last.text
    assert all(last.token_ids[: len(each.token_ids)] == each.token_ids for each in outputs)
    assert last.completions[0].text == last.text
