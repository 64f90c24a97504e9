"""Speech alone is heard where that is wanted, and a model in a loop is stopped."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import resources

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from engine import AudioPrompt, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from engine.interface.outputs import CompletionOutput, FinishReason
from engine.llm.output_processor import _repeats
from engine.media.voice_detector import spoken_spans

RATE = 16_000
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def engine(seeded: Callable[[str], str]) -> LLMEngine:
    return LLMEngine(EngineConfig(model=seeded("whisper"), num_blocks=256, vad=True))


def completions(outputs: Sequence[RequestOutput]) -> list[CompletionOutput]:
    return [each.outputs[0] for each in outputs]


def question() -> np.ndarray:
    file = resources.files("stage_configs") / "spoken_sums/questions/twelve_plus_thirty.flac"
    with file.open("rb") as opened:
        samples, rate = soundfile.read(opened, dtype="float32")
    assert rate == RATE
    return samples


def noise(seconds: float) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.05, round(seconds * RATE)).astype(np.float32)


def test_spans_hold_speech_and_little_else():
    said = question()
    samples = np.concatenate([noise(2), said, noise(4), said, noise(1)])
    first = 2 * RATE
    begins = (first, first + len(said) + 4 * RATE)
    spans = spoken_spans(samples, RATE)
    assert len(spans) == 2
    for (begin, end), spoken in zip(spans, begins, strict=True):
        assert spoken - RATE // 2 <= begin <= spoken + RATE // 4
        assert spoken + len(said) - RATE // 2 <= end <= spoken + len(said) + RATE
    # At another rate as well, scaled.
    twice = spoken_spans(np.repeat(samples, 2), 2 * RATE)
    assert np.allclose(np.array(twice) / 2, spans, atol=RATE / 10)


@pytest.mark.parametrize("seconds", [1.0, 5.0])
def test_what_is_no_speech_gives_no_text(engine: LLMEngine, seconds: float):
    for samples in (np.zeros(round(seconds * RATE), np.float32), noise(seconds)):
        (output,) = completions(engine.generate([AudioPrompt(samples, RATE)], GREEDY))
        assert output.text == "" and output.finish_reason is FinishReason.STOP
        (output,) = completions(engine.generate([AudioPrompt(samples, RATE, vad=False)], GREEDY))
        assert len(output.token_ids) > 1


def test_speech_is_heard_as_if_all_else_were_silence(engine: LLMEngine):
    samples = np.concatenate([noise(0.5), question()[: RATE // 2], noise(0.5)])
    masked = np.zeros_like(samples)
    for begin, end in spoken_spans(samples, RATE):
        masked[begin:end] = samples[begin:end]
    assert masked.any() and not masked.all()
    heard, expected = completions(
        engine.generate([AudioPrompt(samples, RATE), AudioPrompt(masked, RATE, vad=False)], GREEDY)
    )
    assert heard.token_ids == expected.token_ids


def test_windows_without_speech_are_passed_over(engine: LLMEngine):
    samples = np.concatenate([noise(9), question(), noise(9), question(), noise(9)])
    spans = [(begin / RATE, end / RATE) for begin, end in spoken_spans(samples, RATE)]
    (output,) = completions(engine.generate([AudioPrompt(samples, RATE)], GREEDY))
    begins = [each.begin_s for each in output.windows]
    assert begins == sorted(begins) and begins[0] == pytest.approx(spans[0][0], abs=0.02)
    for begin in begins:
        assert any(first - 0.02 <= begin < last for first, last in spans), (begin, spans)
    assert any(begin >= spans[1][0] - 0.02 for begin in begins)


class Written:
    """What a guard looks at of a request."""

    def __init__(self, prompt: list[int], written: list[int], most: int | None) -> None:
        self.token_ids = prompt + written
        self.num_prompt_tokens = len(prompt)
        self.params = SamplingParams(max_repeats=most)


@given(
    st.lists(st.integers(0, 2), max_size=4),
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 4),
)
def test_a_loop_is_what_a_regular_expression_says(prompt: list[int], ids: list[int], most: int):
    text = "".join(map(str, ids))
    is_loop = re.search(rf"(.{{1,20}})\1{{{most}}}$", text) is not None
    assert _repeats(Written(prompt, ids, most)) == is_loop
    assert not _repeats(Written(prompt, ids, None))


def test_a_loop_ends_the_text(engine: LLMEngine):
    loop = GREEDY.model_copy(update={"max_tokens": 30, "max_repeats": 4})
    forced = SamplingParams.model_validate({**loop.model_dump(), "logit_bias": {30: 100.0}})
    prompt = AudioPrompt(question()[:RATE], RATE, vad=False)
    (output,) = completions(engine.generate([prompt], forced))
    assert output.token_ids == (30,) * 5 and output.finish_reason is FinishReason.LENGTH
