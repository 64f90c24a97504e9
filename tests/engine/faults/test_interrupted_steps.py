"""An exception at any line of a step leaves an engine that goes on rightly.

Whatever interrupts a step (a lack of memory, a signal), the requests begin anew, and those whose
tokens were being taken in fail alone. Every run here interrupts one step at one line, goes on, and
asks everything again: all that is answered has to be what each request says alone, uncached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from engine import EngineConfig, LLMEngine
from engine.interface.engine import EngineBrokenError
from tests.support.disturbed_run import disturbed_run, lines_of_step
from tests.support.line_faults import LineFault
from tests.support.request_stream import BLOCK_SIZE, Alone, Ask

MODELS = {"qwen2": 26, "jamba": 8, "bart": 40}
"""Blocks with which three of the four requests run at once, and one has to wait or give way."""
ASKS = tuple(Ask(0, 14, n, 4 + n, False, n == 2, 0, None) for n in range(4))
FAULTS_A_STEP = 3
SOUND = {"went on", "failed alone"}


@dataclass(frozen=True)
class Rig:
    build: Callable[[], LLMEngine]
    alone: Alone
    num_lines: list[int]


@pytest.fixture(scope="module", params=MODELS)
def rig(request: pytest.FixtureRequest, seeded: Callable[[str], str]) -> Rig:
    checkpoint = seeded(request.param)

    def build() -> LLMEngine:
        return LLMEngine(
            EngineConfig(
                model=checkpoint,
                block_size=BLOCK_SIZE,
                num_blocks=MODELS[request.param],
                max_num_seqs=3,
                max_num_batched_tokens=16,
                max_model_len=96,
            )
        )

    return Rig(build, Alone(checkpoint), lines_of_step(build, ASKS))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_step_interrupted_at_any_line_answers_nothing_wrongly(
    rig: Rig, error: type[BaseException]
) -> None:
    engine = rig.build()
    kinds = set()
    # Lines spread over a step, others in every step, so that all of it has its turn.
    for step, num_lines in enumerate(rig.num_lines):
        for turn in range(FAULTS_A_STEP):
            line = (turn * num_lines + step * 97) // FAULTS_A_STEP % num_lines
            fault = LineFault(line, error)
            engine.reset_prefix_cache()
            outcome = disturbed_run(engine, ASKS, rig.alone, step=step, fault=fault)
            assert outcome.kind in SOUND, outcome
            kinds.add(outcome.kind)
    assert "went on" in kinds


def test_an_engine_interrupted_while_it_mends_itself_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.build()
    engine.add_request("r", ASKS[0].prompt, ASKS[0].params)

    def fail() -> None:
        raise MemoryError("again")

    monkeypatch.setattr(engine._runner, "clear", fail)
    with pytest.raises(MemoryError, match="again"), LineFault(40, KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    for call in (engine.step, lambda: engine.abort("r")):
        with pytest.raises(EngineBrokenError, match="KeyboardInterrupt.*build it anew"):
            call()
