"""A request that breaks a model in one stage is freed in all, and its neighbours finish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.execution.model_runner import ModelRunner
from engine.models.qwen2_5_omni.talker import Qwen2_5OmniTalker
from omni.runtime.orchestrator import Orchestrator
from tests.support.omni_stages import Conversation, Turn, assert_same, build_pipeline

ASKED = {
    "x": Conversation((Turn(0, picture=0),)),
    "bad": Conversation((Turn(1, sound=0),), speaker=1),
    "y": Conversation((Turn(2, picture=1, sound=1),)),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("stage", ["thinker", "talker"])
@pytest.mark.parametrize("num_steps", [0, 4])
def test_a_request_that_breaks_the_model_fails_alone(
    seeded: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    streaming: bool,
    num_steps: int,
) -> None:
    folder = seeded("qwen2_5_omni")
    pipeline = build_pipeline(folder, streaming=streaming, block_size=8)
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

    orchestrator = Orchestrator(pipeline)
    expected = {}
    for name in ("x", "y"):
        orchestrator.add_request(ASKED[name].request(name))
        while orchestrator.has_unfinished_requests:
            expected.update({o.request_id: o for o in orchestrator.step() if o.finished})
    for each in pipeline.stages.values():
        each.reset_prefix_cache()
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
        assert_same(last[name], expected[name])
    assert not any(each.has_unfinished_requests for each in pipeline.stages.values())
    pipeline.close()
