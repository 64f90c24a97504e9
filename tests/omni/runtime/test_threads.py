"""Each of the stages that share a process uses the CPU threads of its placement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from threading import Thread

import pytest
import torch

from engine.interface.outputs import OutputDelta
from omni import Omni, OmniOutput, OmniRequest, Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from stages import Stage
from stages.engine_stage import EngineStage
from tests.support.whole_orchestrator import WholeOrchestrator

OF_THE_PROCESS = 3
ONE_FOR_THE_WRITER = {"stages.writer.placement.threads": 1}


@pytest.fixture(autouse=True)
def _threads_of_the_process() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(OF_THE_PROCESS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """The threads that each stage's steps had."""
    taken: dict[str, set[int]] = {}
    step = EngineStage.step_deltas

    def noting(self: EngineStage) -> list[OutputDelta]:
        taken.setdefault(self.name, set()).add(torch.get_num_threads())
        return step(self)

    monkeypatch.setattr(EngineStage, "step_deltas", noting)
    return taken


def _drive(orchestrator: WholeOrchestrator) -> OmniOutput:
    orchestrator.add_request(OmniRequest("Once upon a time", "r"))
    while True:
        for output in orchestrator.step():
            if output.finished:
                return output


def test_each_stage_has_its_own_number_and_the_process_keeps_its_own(
    taken: dict[str, set[int]],
) -> None:
    with Omni("two_step", overrides=ONE_FOR_THE_WRITER) as omni:
        (one,) = omni.generate("Once upon a time")
    assert taken == {"writer": {1}, "reader": {OF_THE_PROCESS}}
    assert torch.get_num_threads() == OF_THE_PROCESS
    with Omni("two_step", overrides={"stages.writer.placement.threads": 2}) as omni:
        (other,) = omni.generate("Once upon a time")
    assert other.stages["reader"].text == one.stages["reader"].text


def test_a_caller_that_drives_the_stages_itself_keeps_its_number(
    taken: dict[str, set[int]],
) -> None:
    config = PipelineConfig.load("two_step", ONE_FOR_THE_WRITER)
    pipeline = Pipeline.from_config(config)
    with closing(pipeline):
        orchestrator = WholeOrchestrator(pipeline)
        assert _drive(orchestrator).error is None
        assert torch.get_num_threads() == OF_THE_PROCESS

        def fail(self: Stage) -> list[OutputDelta]:
            raise RuntimeError(f"with {torch.get_num_threads()}")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EngineStage, "step_deltas", fail)
            output = _drive(orchestrator)
    assert "with 1" in str(output.error)
    assert torch.get_num_threads() == OF_THE_PROCESS
    assert taken == {"writer": {1}, "reader": {OF_THE_PROCESS}}


def test_threads_that_begin_meanwhile_have_the_number_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch gives a new thread the number that was set last, by any thread."""
    seen: list[int] = []
    steps: dict[str, set[int]] = {}
    step = EngineStage.step_deltas

    def noting(self: EngineStage) -> list[OutputDelta]:
        steps.setdefault(self.name, set()).add(torch.get_num_threads())
        thread = Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return step(self)

    monkeypatch.setattr(EngineStage, "step_deltas", noting)
    all_on_one = ONE_FOR_THE_WRITER | {"stages.reader.placement.threads": 1}
    with Omni("two_step", overrides=all_on_one) as omni:
        omni.generate("Once upon a time")
        assert steps == {"writer": {1}, "reader": {1}}
        assert set(seen) == {OF_THE_PROCESS}
        torch.set_num_threads(OF_THE_PROCESS + 1)
        omni.generate("Once upon another time")
        assert torch.get_num_threads() == OF_THE_PROCESS + 1
        assert set(seen) == {OF_THE_PROCESS, OF_THE_PROCESS + 1}


def test_one_omni_leaves_another_its_number(taken: dict[str, set[int]]) -> None:
    with (
        Omni("two_step", overrides=ONE_FOR_THE_WRITER) as one,
        Omni("two_step", overrides={"stages.reader.placement.threads": 2}) as other,
    ):
        for omni in (one, other, one):
            omni.generate("Once upon a time")
    assert taken == {"writer": {1, OF_THE_PROCESS}, "reader": {OF_THE_PROCESS, 2}}
