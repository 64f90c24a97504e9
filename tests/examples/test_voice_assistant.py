"""The voice assistant speaks before its answer is whole; with small models in place of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from omni import AudioPrompt, Omni, OmniRequest
from tests.support.encoder_decoder_requests import tone

EXAMPLE = Path(__file__).parents[2] / "examples/voice_assistant/voice_assistant.yaml"
RATE = 1000


class Voice:
    """Says every character as one sample: its code."""

    config = SimpleNamespace(sample_rate=RATE)

    @classmethod
    def load(cls, _: Any) -> Voice:
        return cls()

    def synthesize(self, text: str) -> Iterator[Any]:
        samples = np.array([ord(each) % 128 / 128 for each in text], np.float32)
        yield SimpleNamespace(audio_float_array=samples)


@pytest.fixture
def voice_package(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("piper")
    package.PiperVoice = Voice
    monkeypatch.setitem(sys.modules, "piper", package)


@pytest.mark.usefixtures("checkpoint_cache", "voice_package")
def test_it_says_its_answer_by_sentences() -> None:
    small = {
        "stages.hears.model": "seeded:whisper",
        "stages.hears.engine.vad": False,
        "stages.hears.sampling.max_tokens": 6,
        "stages.answers.model": "seeded:llama",
        "stages.answers.engine.max_model_len": 256,
        "stages.answers.sampling": {"temperature": 1.0, "seed": 3, "max_tokens": 60},
        "stages.speaks.voice": str(EXAMPLE),
    }
    with Omni(str(EXAMPLE), overrides=small) as omni:
        tokenizer: Any = omni.pipeline.stages["answers"].tokenizer
        ends = {
            str(token_id): 20.0 for token_id in tokenizer.encode("\n.", add_special_tokens=False)
        }
        sampling = {"answers": {"logit_bias": ends}}
        request = OmniRequest(AudioPrompt(tone(1.0), 16_000), sampling=sampling)
        lengths: list[int] = []
        for output in omni.stream([request]):
            assert output.error is None
            spoken = output.stages.get("speaks")
            if spoken is not None and spoken.audio_delta is not None:
                lengths.append(len(spoken.audio_delta.samples))
        answer = output.stages["answers"].text
        said = output.stages["speaks"].audio.samples.numpy()
    np.testing.assert_array_equal(said, [ord(each) % 128 / 128 for each in answer])
    assert sum(lengths) == len(answer)
    assert 0 < lengths[0] < len(answer), "it began while the answer was written"
