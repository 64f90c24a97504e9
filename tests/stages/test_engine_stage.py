"""A stage returns the requested tensors or fails the request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine import EngineConfig, FinishReason, SamplingParams, TokensPrompt
from engine.interface.outputs import OutputDelta
from stages import AutoregressiveStage, StageOutput, StageRequest
from stages.engine_stage import select_tensors
from tests.support.settled_stages import run_stage

OUTPUT = OutputDelta(
    "r",
    finished=True,
    finish_reason=FinishReason.STOP,
    tensors={"hidden_states": torch.zeros(2, 3), "codes": torch.ones(2)},
)


def test_a_missing_requested_tensor_fails_the_request() -> None:
    failed = select_tensors(OUTPUT, ["codes", "mel"])
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.tensors == {}
    assert "no tensor named 'mel'" in str(failed.error)
    assert "['codes', 'hidden_states']" in str(failed.error)


def test_unfinished_and_failed_outputs_need_no_tensors() -> None:
    for output in (
        replace(OUTPUT, finished=False, tensors={}),
        replace(OUTPUT, error="out of luck", tensors={}),
        replace(OUTPUT, finish_reason=FinishReason.ABORT, tensors={}),
    ):
        assert select_tensors(output, ["codes"]) is output


def build(
    seeded: Callable[[str], str], kind: type[AutoregressiveStage] = AutoregressiveStage
) -> AutoregressiveStage:
    config = EngineConfig(model=seeded("qwen2"), num_blocks=32, block_size=4, max_model_len=32)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return kind("s", config, sampling=greedy)


@pytest.fixture
def stage(seeded: Callable[[str], str]) -> AutoregressiveStage:
    return build(seeded)


def test_a_request_prepared_before_a_rebuild_enters_the_new_engine(
    stage: AutoregressiveStage,
) -> None:
    prepared = stage.prepare(StageRequest("a", "Hello"))
    old = stage.engine
    stage.rebuild()
    stage.add(prepared)
    assert not old.live_request_ids and stage.engine.live_request_ids == ("a",)
    outputs = [output for _ in range(4) for output in stage.step()]
    assert [output.request_id for output in outputs if output.finished] == ["a"]
    assert not stage.has_unfinished_requests
    stage.close()


def test_an_overridden_add_request_is_called(
    seeded: Callable[[str], str],
) -> None:
    class Polite(AutoregressiveStage):
        def add_request(self, request: StageRequest) -> None:
            super().add_request(replace(request, prompt=f"Please: {request.prompt}"))

    stage = build(seeded, Polite)
    stage.add(stage.prepare(StageRequest("a", "Hello")))
    assert stage.engine.tokenizer is not None
    plain = len(stage.engine.tokenizer("Hello")["input_ids"])
    outputs = [output for _ in range(4) for output in stage.step()]
    assert outputs[-1].finished and outputs[-1].num_prompt_tokens > plain
    stage.close()


def run(stage: AutoregressiveStage) -> dict[str, StageOutput]:
    ids = {"x": 5, "y": 6}
    requests = (StageRequest(name, TokensPrompt((token, 7, 8))) for name, token in ids.items())
    return run_stage(stage, *requests)


def test_a_step_that_fails_twice_in_a_row_raises(
    stage: AutoregressiveStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(stage)

    def fail() -> None:
        raise MemoryError("no room")

    stage.add_request(StageRequest("z", TokensPrompt((5, 7, 8))))
    with monkeypatch.context() as patch:
        patch.setattr(stage.engine, "_step_deltas", fail)
        for _ in range(2):
            assert stage.step() == []
            with pytest.raises(MemoryError, match="no room"):
                stage.step()
    stage.abort("z")
    again = run(stage)
    assert {name: out.token_ids for name, out in again.items()} == {
        name: out.token_ids for name, out in expected.items()
    }


def test_an_output_error_fails_only_its_request(
    stage: AutoregressiveStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(stage)

    def fail(delta: OutputDelta) -> OutputDelta:
        if delta.request_id == "x":
            raise ArithmeticError("no words")
        return delta

    monkeypatch.setattr(stage, "_with_tensors", fail)
    last = run(stage)
    assert last["x"].error == "its output cannot be made: ArithmeticError: no words"
    assert last["x"].finish_reason is FinishReason.ERROR
    assert last["y"].error is None and last["y"].token_ids == expected["y"].token_ids


def test_a_closed_stage_refuses_calls(stage: AutoregressiveStage) -> None:
    stage.add_request(StageRequest("x", TokensPrompt((5, 7, 8))))
    stage.close()
    stage.close()
    for call in (lambda: stage.add_request(StageRequest("y", "hi")), stage.step, stage.rebuild):
        with pytest.raises(RuntimeError, match="stage 's' is closed: build a new one"):
            call()
