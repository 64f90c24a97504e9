"""A speech pipeline of stages without models, and functions that run it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniOutput, OmniRequest
from stages import StageOutput
from tests.support.fake_speech import FakeSpeechStage, Talker, Thinker, Vocoder
from tests.support.patience import PATIENCE_S
from tests.support.settled_stages import assert_settled
from tests.support.whole_orchestrator import WholeOrchestrator

PROMPTS = {"x": "hello there", "y": "hm", "z": "what is it that you hear"}


def speech_stages(
    chunks: tuple[int | None, int | None] = (2, 3), **changes: dict[str, Any]
) -> list[FakeSpeechStage]:
    """Return a thinker, a talker and a vocoder; keyword arguments by stage."""
    talker: dict[str, Any] = {"chunk_size": chunks[0], "tail": 6, "final_output": ()}
    code2wav: dict[str, Any] = {"chunk_size": chunks[1], "tail": 0, "final_output": ("audio",)}
    talker["transform"], code2wav["transform"] = "thinker_to_talker", "talker_to_code2wav"
    return [
        Thinker("thinker", **changes.get("thinker", {})),
        Talker("talker", "thinker", **talker | changes.get("talker", {})),
        Vocoder("code2wav", "talker", **code2wav | changes.get("code2wav", {})),
    ]


def drain(
    orchestrator: WholeOrchestrator, each_turn: Callable[[], None] = lambda: None
) -> dict[str, list[OmniOutput]]:
    """Return every output by request, until nothing is left."""
    outputs: dict[str, list[OmniOutput]] = {}
    until_s = time.monotonic() + PATIENCE_S
    for _ in range(20_000):
        if not orchestrator.has_unfinished_requests:
            return outputs
        assert time.monotonic() < until_s, "nothing comes any more"
        for output in orchestrator.step():
            outputs.setdefault(output.request_id, []).append(output)
        each_turn()
    raise AssertionError("requests are left")


def last_outputs(orchestrator: WholeOrchestrator) -> dict[str, OmniOutput]:
    """Return the last output of every request, when nothing is left."""
    return {request_id: outputs[-1] for request_id, outputs in drain(orchestrator).items()}


def start(
    stages: Sequence[FakeSpeechStage],
    prompts: Mapping[str, str] = PROMPTS,
    on_stage_output: Callable[[StageOutput], None] | None = None,
    **more: Any,
) -> WholeOrchestrator:
    """Add one request per prompt."""
    orchestrator = WholeOrchestrator(Pipeline(stages), on_stage_output=on_stage_output)
    for request_id, prompt in prompts.items():
        orchestrator.add_request(OmniRequest(prompt, request_id, **more))
    return orchestrator


def run(
    stages: Sequence[FakeSpeechStage], prompts: Mapping[str, str] = PROMPTS, **more: Any
) -> dict[str, OmniOutput]:
    """Return the last outputs; check that no stage keeps anything."""
    last = last_outputs(start(stages, prompts, **more))
    assert_settled(stages)
    return last


def text_and_sound(output: OmniOutput) -> tuple[str | None, list[float]]:
    """Return the text, and the samples of the sound."""
    audio = output.stages["code2wav"].audio
    assert audio is not None
    return output.stages["thinker"].text, audio.samples.tolist()


def whole(prompts: Mapping[str, str] = PROMPTS, **more: Any) -> dict[str, OmniOutput]:
    """Return the last outputs without streaming."""
    return run(speech_stages((None, None)), prompts, **more)


def until(orchestrator: WholeOrchestrator, condition: Callable[[], bool]) -> None:
    """Step until a condition holds."""
    for _ in range(10_000):
        if condition():
            return
        orchestrator.step()
    raise AssertionError("it never came to that")
