"""A request that breaks a model in one stage is freed in all, and its neighbours finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from engine.execution.model_runner import ModelRunner
from engine.models.qwen2_5_omni.talker import Qwen2_5OmniTalker
from omni import OmniOutput
from omni.pipelines.pipeline import Pipeline
from tests.support.omni_stages import Conversation, Turn, assert_same, build_pipeline
from tests.support.whole_orchestrator import WholeOrchestrator

ASKED = {
    "x": Conversation((Turn(0, picture=0),)),
    "bad": Conversation((Turn(1, sound=0),), speaker=1),
    "y": Conversation((Turn(2, picture=1, sound=1),)),
}


@dataclass(frozen=True)
class Rig:
    """A pipeline, and what two requests say in it when nothing fails."""

    pipeline: Pipeline
    expected: dict[str, OmniOutput]


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "streaming"])
def rig(request: pytest.FixtureRequest, seeded: Callable[[str], str]) -> Iterator[Rig]:
    pipeline = build_pipeline(seeded("qwen2_5_omni"), streaming=request.param, block_size=8)
    orchestrator = WholeOrchestrator(pipeline)
    expected = {}
    for name in ("x", "y"):
        orchestrator.add_request(ASKED[name].request(name))
        while orchestrator.has_unfinished_requests:
            expected.update({o.request_id: o for o in orchestrator.step() if o.finished})
    yield Rig(pipeline, expected)
    pipeline.close()


@pytest.mark.parametrize("stage", ["thinker", "talker"])
@pytest.mark.parametrize("num_steps", [0, 4])
def test_a_request_that_breaks_the_model_fails_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, stage: str, num_steps: int
) -> None:
    pipeline = rig.pipeline
    plain = ModelRunner.execute
    survived = 0

    def execute(self: ModelRunner, output: Any) -> Any:
        nonlocal survived
        is_talker = isinstance(self._model, Qwen2_5OmniTalker)
        if is_talker == (stage == "talker"):
            ids = [item.request.request_id for item in output.scheduled]
            if "bad" in ids:
                if survived == num_steps:
                    raise RuntimeError("out of memory")
                survived += 1
        return plain(self, output)

    for each in pipeline.stages.values():
        each.reset_prefix_cache()
    orchestrator = WholeOrchestrator(pipeline)
    monkeypatch.setattr(ModelRunner, "execute", execute)
    for name, asked in ASKED.items():
        orchestrator.add_request(asked.request(name))
    last = {}
    while orchestrator.has_unfinished_requests:
        last.update({o.request_id: o for o in orchestrator.step() if o.finished})
        for each in pipeline.stages.values():
            each.check_integrity()
    assert f"stage {stage!r}: the step failed: RuntimeError: out of memory" in str(
        last["bad"].error
    )
    for name in ("x", "y"):
        assert_same(last[name], rig.expected[name])
    assert not any(each.has_unfinished_requests for each in pipeline.stages.values())
