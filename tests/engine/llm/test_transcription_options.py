"""Transcription options give the results of transformers' ``generate`` with the same options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import (
    AutoFeatureExtractor,
    AutoTokenizer,
    GenerationMixin,
    WhisperForConditionalGeneration,
)
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from engine import (
    AudioPrompt,
    CompletionOutput,
    EngineConfig,
    LLMEngine,
    SamplingParams,
    TranscriptionOptions,
)
from engine.inputs.input_processor import _SEED_STEP
from engine.models.whisper.windows import warp
from engine.sampling.sampler import SamplingState
from tests.engine.llm.test_speech_recognition import melody
from tests.support.encoder_decoder_requests import SAMPLING_RATE

SEED, NUM_TOKENS = 5, 8
SOUNDS = (melody(2.0, 0), melody(3.5, 1))
"""A sound of one window, and one of several."""
SMALL = st.integers(-3, 3) | st.floats(-3, 3)


class Reference:
    """transformers' Whisper, which draws the samples of a request with this seed."""

    def __init__(self, folder: str) -> None:
        self.model: Any = WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.extractor = AutoFeatureExtractor.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.num_runs = 0
        self._draws: Iterator[int] = count()

    def begin_run(self) -> None:
        self.num_runs += 1
        self._draws = count()

    def draw(self, probabilities: torch.Tensor, **_: Any) -> torch.Tensor:
        seed = (SEED + (self.num_runs - 1) * _SEED_STEP) % 2**63
        state = SamplingState(SamplingParams(), (), seed, (), probabilities.shape[-1])
        state.num_generated = next(self._draws)
        reached = probabilities.double().cumsum(dim=-1)
        share = state.next_uniform() * reached[:, -1:]
        return torch.searchsorted(reached, share)

    @torch.inference_mode()
    def answer(self, samples: np.ndarray, **options: Any) -> Any:
        self.num_runs = 0
        is_long = len(samples) > self.extractor.n_samples
        cut = {"truncation": False, "padding": "longest"} if is_long else {}
        read = self.extractor(
            samples,
            sampling_rate=SAMPLING_RATE,
            return_attention_mask=True,
            return_tensors="pt",
            **cut,
        )
        if "prompt" in options:
            # Not ``get_prompt_ids``: it treats all ids above the end token as special.
            text = f"<|startofprev|> {options.pop('prompt')}"
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            options["prompt_ids"] = torch.tensor(ids)
        given = {"max_new_tokens": NUM_TOKENS, "top_k": 0} | options
        return self.model.generate(**read, return_segments=True, **given)


@pytest.fixture(scope="module")
def folder(seeded: Callable[[str], str]) -> str:
    return seeded("whisper")


@pytest.fixture(scope="module")
def reference(folder: str) -> Iterator[Reference]:
    made, plain = Reference(folder), GenerationMixin.generate

    def generate(*args: Any, **given: Any) -> Any:
        made.begin_run()
        return plain(*args, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "generate", generate)
        patch.setattr(torch, "multinomial", made.draw)
        yield made


@pytest.fixture(scope="module")
def engine(folder: str) -> LLMEngine:
    return LLMEngine(EngineConfig(model=folder, num_blocks=256, block_size=8, dtype="float32"))


def transcribe(
    engine: LLMEngine, samples: np.ndarray, options: dict[str, Any], **wishes: Any
) -> CompletionOutput:
    prompt = AudioPrompt(samples, transcription=TranscriptionOptions(**options), **wishes)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=SEED)
    (output,) = engine.generate(prompt, params)
    assert output.error is None
    engine.check_integrity()
    return output.outputs[0]


FALLBACK = {"temperature": (0.0, 0.4, 1.0)}
CASES: dict[str, dict[str, Any]] = {
    "timestamps alone": {},
    "likely": FALLBACK | {"logprob_threshold": -3.5},
    "varied": FALLBACK | {"compression_ratio_threshold": 0.65},
    "goes on": {"condition_on_prev_tokens": True},
    "silent": FALLBACK | {"logprob_threshold": -3.0, "no_speech_threshold": 0.001},
    "goes on unless hot": FALLBACK | {"condition_on_prev_tokens": True, "logprob_threshold": -3.5},
    "a prompt": {"prompt": "the rain in Spain"},
    "a prompt to go on from": {"prompt": "the rain", "condition_on_prev_tokens": True},
    "all of it": FALLBACK
    | {
        "prompt": "the rain",
        "condition_on_prev_tokens": True,
        "logprob_threshold": -3.5,
        "compression_ratio_threshold": 0.65,
        "no_speech_threshold": 0.01,
    },
}


@pytest.mark.parametrize("case", [name for name in CASES if name != "all of it"])
def test_tokens_are_those_of_transformers(
    engine: LLMEngine, reference: Reference, case: str
) -> None:
    """All options together are compared below, with their times."""
    options = CASES[case]
    for sound in SOUNDS:
        theirs = reference.answer(sound, language="en", return_timestamps=True, **options)
        ours = transcribe(engine, sound, options, language="en", timestamps=True)
        assert list(ours.token_ids) == [int(each) for each in theirs["sequences"][0]]


@given(arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(1, 12)), elements=SMALL))
def test_the_way_through_a_table_is_that_of_transformers(costs: np.ndarray) -> None:
    rows, columns = _dynamic_time_warping(costs)
    assert warp(costs).tolist() == columns[np.diff(rows, prepend=-1) > 0].tolist()


def test_thresholds_also_apply_without_timestamps(engine: LLMEngine, reference: Reference) -> None:
    options = CASES["likely"] | {"prompt": "the rain"}
    for seed in range(2):
        sound = melody(1.3, seed)
        theirs = reference.answer(sound, language="de", task="translate", **options)
        ours = transcribe(engine, sound, options, language="de", task="translate")
        assert list(ours.token_ids) == [int(each) for each in theirs["sequences"][0]]
        assert reference.num_runs > 1


def test_a_language_is_detected_without_the_prompt(engine: LLMEngine, reference: Reference) -> None:
    for seed in range(2):
        sound, options = melody(3.0, 20 + seed), {"prompt": "the rain in Spain"}
        theirs = reference.answer(sound, task="transcribe", return_timestamps=True, **options)
        ours = transcribe(engine, sound, options)
        assert list(ours.token_ids) == [int(each) for each in theirs["sequences"][0]]


@pytest.mark.parametrize("case", ["plain", "all of it"])
def test_tokens_and_words_have_the_times_of_transformers(
    engine: LLMEngine, reference: Reference, case: str
) -> None:
    options = (CASES | {"plain": {}})[case] | {"return_token_timestamps": True}
    for sound, wanted in zip(SOUNDS, (None, True), strict=True):
        theirs = reference.answer(sound, language="en", return_timestamps=wanted, **options)
        segments = theirs["segments"][0]
        expected = [float(each) for segment in segments for each in segment["token_timestamps"]]
        ours = transcribe(engine, sound, options, language="en", timestamps=wanted)
        assert list(ours.token_ids) == [int(each) for each in theirs["sequences"][0]]
        found = [time for window in ours.windows for time in window.token_timestamps]
        assert found == pytest.approx(expected, abs=2e-3)
        assert len(found) == len(ours.token_ids)
        _, expected_words = reference.tokenizer._decode_asr(
            [{"tokens": torch.tensor([ours.token_ids]), "token_timestamps": torch.tensor([found])}],
            return_timestamps="word",
            return_language=False,
            time_precision=0.02,
        )
        words = [word for window in ours.windows for word in window.words]
        assert [word.word for word in words] == [each["text"] for each in expected_words["chunks"]]
        for word, chunk in zip(words, expected_words["chunks"], strict=True):
            assert (word.start, word.end) == pytest.approx(chunk["timestamp"], abs=0.011)


def test_caching_changes_nothing(folder: str, engine: LLMEngine) -> None:
    options = CASES["all of it"] | {"return_token_timestamps": True}
    uncached = LLMEngine(
        EngineConfig(
            model=folder, num_blocks=42, block_size=8, dtype="float32",
            enable_prefix_caching=False, max_num_batched_tokens=16,
        )
    )  # fmt: skip
    sounds = [melody(seconds, 3) for seconds in (3.0, 1.5)]
    prompts = [AudioPrompt(s, transcription=TranscriptionOptions(**options)) for s in sounds]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, n=2)
    expected = [each.outputs for each in engine.generate(prompts, params)]
    again = [each.outputs for each in engine.generate(prompts, params)]
    plain = [each.outputs for each in uncached.generate(prompts, params)]
    for one, two, three in zip(expected, again, plain, strict=True):
        for a, b, c in zip(one, two, three, strict=True):
            assert a.token_ids == b.token_ids == c.token_ids
            for x, y in zip(a.windows, c.windows, strict=True):
                assert x.token_timestamps == y.token_timestamps and x.words == y.words
                assert x.temperature == y.temperature
                assert x.no_speech_prob == pytest.approx(y.no_speech_prob, abs=1e-4)


WRONG = {
    "no_speech_threshold needs a logprob_threshold": {"no_speech_threshold": 0.6},
    "without special tokens": {"prompt": "a <|startoftranscript|> b"},
}


@pytest.mark.parametrize("message", WRONG)
def test_invalid_options_are_refused(engine: LLMEngine, message: str) -> None:
    prompt = AudioPrompt(melody(1.0, 0), transcription=TranscriptionOptions(**WRONG[message]))
    with pytest.raises(ValueError, match=message):
        engine.add_request("r", prompt)
    with pytest.raises(ValueError, match="temperature must be one number of at least 0"):
        TranscriptionOptions(temperature=())


@pytest.mark.parametrize(
    "wrong", [{"language": 5}, {"vad": "yes"}, {"transcription": {"prompt": "a"}}]
)
def test_options_of_another_type_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be "):
        AudioPrompt(melody(1.0, 0), **wrong)
