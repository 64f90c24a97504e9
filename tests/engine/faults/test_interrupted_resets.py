"""Forgetting what was cached is as whole as a step; and what interrupts need not say what it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, TokensPrompt
from tests.support.line_faults import LineFault

PROMPT = TokensPrompt(tuple(range(20, 61)))
PARAMS = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture
def engine(seeded: Callable[[str], str]) -> LLMEngine:
    return LLMEngine(EngineConfig(model=seeded("qwen2"), block_size=8, num_blocks=14))


def test_a_reset_interrupted_at_any_line_leaves_the_engine_sound(engine: LLMEngine) -> None:
    (expected,) = engine.generate([PROMPT], PARAMS)
    line = 0
    while True:
        fault = LineFault(line, KeyboardInterrupt)
        with suppress(KeyboardInterrupt), fault:
            engine.reset_prefix_cache()
        engine.check_integrity()
        (output,) = engine.generate([PROMPT], PARAMS)
        assert output.error is None, fault.place
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids, fault.place
        if fault.place is None:
            break
        line += 1
    assert line > 20 and not engine.is_broken


def test_an_exception_that_cannot_say_what_it_is_ends_like_any_other(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SpeechlessError(KeyboardInterrupt):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def interrupted() -> None:
        raise SpeechlessError

    with monkeypatch.context() as patched:
        patched.setattr(engine._runner, "execute", lambda _: interrupted())
        engine.add_request("r", PROMPT, PARAMS)
        with pytest.raises(SpeechlessError):
            engine.step()
    assert not engine.is_broken and not engine.ownership.is_inside
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert outputs[-1].finished and outputs[-1].error is None
