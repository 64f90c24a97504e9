"""Whisper against transformers: long recordings, languages, timestamps, silence."""

from __future__ import annotations

import gc
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    AutoFeatureExtractor,
    AutoTokenizer,
    GenerationConfig,
    WhisperForConditionalGeneration,
)
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from engine import (
    AudioPrompt,
    CompletionOutput,
    EngineConfig,
    ExplicitEncoderDecoderPrompt,
    FinishReason,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
    TranscriptionOptions,
)
from engine.inputs.encoder_decoder_inputs import InputWindows
from engine.llm.output_processor import OutputProcessor, _is_repeating
from engine.media.voice_detector import spoken_spans
from engine.models.whisper.whisper import TimestampRule
from engine.models.whisper.windows import SpeechWindows
from engine.requests.encoder_input import EncoderInput
from engine.sampling.sampler import Sampler, SamplingState
from omni.server.openai.transcription import TIMESTAMP, segments_of
from prefix_cache.blocks.block_pool import PageArena
from tests.support.encoder_decoder_requests import SAMPLING_RATE, Case, Oracle, tone
from tests.support.line_faults import Event, LineFault

WINDOW_S = 2
SECONDS = (2.5, 4.0, 5.37, 9.0)


def melody(seconds: float, seed: int) -> np.ndarray:
    """Return tones of various pitches and loudness, with pauses."""
    draw = np.random.default_rng(seed)
    parts = [
        tone(0.37, float(pitch), seed) * loud
        for pitch, loud in zip(draw.uniform(100, 3000, 40), draw.uniform(0, 1, 40), strict=True)
    ]
    return np.concatenate(parts)[: round(seconds * SAMPLING_RATE)].astype(np.float32)


@pytest.fixture(scope="module")
def folder(seeded: Callable[[str], str]) -> str:
    return seeded("whisper")


@pytest.fixture(scope="module")
def engine(folder: str) -> LLMEngine:
    return LLMEngine(
        EngineConfig(model=folder, num_blocks=256, block_size=8, max_num_seqs=4, dtype="float32"),
        output_names=("hidden_states",),
    )


@pytest.fixture(scope="module")
def long_form(folder: str) -> Callable[..., Any]:
    """transformers' ``generate`` over samples of any length."""
    model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    extractor = AutoFeatureExtractor.from_pretrained(folder)

    @torch.inference_mode()
    def generate(samples: np.ndarray, num_tokens: int | None, **wishes: Any) -> Any:
        made = extractor(
            samples,
            sampling_rate=SAMPLING_RATE,
            truncation=False,
            padding="longest",
            return_tensors="pt",
        )
        given = {} if num_tokens is None else {"max_new_tokens": num_tokens}
        return model.generate(made["input_features"], return_timestamps=True, **given, **wishes)

    return generate


@pytest.fixture(scope="module")
def reference(long_form: Callable[..., Any]) -> Callable[..., list[int]]:
    return lambda *given, **wishes: [int(each) for each in long_form(*given, **wishes)[0]]


@pytest.fixture(scope="module")
def reference_segments(long_form: Callable[..., Any]) -> Callable[[np.ndarray, int], Any]:
    def answer(samples: np.ndarray, num_tokens: int) -> list[tuple[float, float, list[int]]]:
        reported = long_form(samples, num_tokens, return_segments=True, language="en")
        return [
            (round(float(each["start"]), 2), round(float(each["end"]), 2), each["tokens"].tolist())
            for each in reported["segments"][0]
        ]

    return answer


def params(num_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, **more)


def run(engine: LLMEngine, prompts: Sequence[Any], sampling: SamplingParams) -> list[RequestOutput]:
    outputs = engine.generate(prompts, sampling)
    assert [output.error for output in outputs] == [None] * len(prompts)
    engine.check_integrity()
    return outputs


@pytest.mark.parametrize("num_tokens", [3, 12])
def test_tokens_are_those_of_transformers(
    engine: LLMEngine, reference: Callable[..., list[int]], num_tokens: int
) -> None:
    sounds = [melody(seconds, seed) for seed, seconds in enumerate(SECONDS)]
    expected = [reference(sound, num_tokens, language="en") for sound in sounds]
    engine.reset_prefix_cache()
    for _ in range(2):
        outputs = run(engine, [AudioPrompt(s, language="en") for s in sounds], params(num_tokens))
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_windows_begin_where_those_of_transformers_do(
    engine: LLMEngine, folder: str, reference_segments: Callable[[np.ndarray, int], Any]
) -> None:
    """Compares the times of the text between two timestamps."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    num_compared = num_late = 0
    for seed, seconds in enumerate((*SECONDS, 6.5, 8.2)):
        sound = melody(seconds, seed)
        (output,) = run(engine, [AudioPrompt(sound, language="en")], params(12))
        completion = output.outputs[0]
        found = segments_of(completion.token_ids, completion.windows, seconds, tokenizer)
        ours = {(each.start, each.end, tuple(each.tokens)) for each in found}
        for start, end, tokens in reference_segments(sound, 12):
            timed = [TIMESTAMP.fullmatch(each) for each in tokenizer.convert_ids_to_tokens(tokens)]
            said = tuple(
                token for token, time in zip(tokens, timed, strict=True)
                if time is None and token not in tokenizer.all_special_ids
            )  # fmt: skip
            if said and timed[0] is not None and timed[-1] is not None:
                assert (start, end, said) in ours
                num_compared += 1
                num_late += start > WINDOW_S
        assert completion.windows[0].begin_s == 0.0
        assert sum(len(each.tokens) for each in found) == sum(
            TIMESTAMP.fullmatch(each) is None and each not in tokenizer.all_special_tokens
            for each in tokenizer.convert_ids_to_tokens(list(completion.token_ids))
        )
    assert num_compared >= 5 and num_late >= 3


def test_segments_need_no_texts_of_timestamps(
    engine: LLMEngine, folder: str, tmp_path: Path
) -> None:
    """Tokenizers of many published models end at ``<|notimestamps|>``."""
    for file in Path(folder).glob("*token*"):
        shutil.copy(file, tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"] = [
        each for each in content["added_tokens"] if TIMESTAMP.fullmatch(each["content"]) is None
    ]
    file.write_text(json.dumps(content))
    full, short = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path)
    assert len(short) < len(full)
    sounds = [melody(seconds, seed) for seed, seconds in enumerate(SECONDS)]
    prompts = [AudioPrompt(sound, language="en") for sound in sounds]
    for output, seconds in zip(run(engine, prompts, params(12)), SECONDS, strict=True):
        given = (output.outputs[0].token_ids, output.outputs[0].windows, seconds)
        found = segments_of(*given, short)
        assert any(each.end != seconds for each in found)
        assert found == segments_of(*given, full)


def test_the_model_s_own_length_ends_windows_too(
    engine: LLMEngine, reference: Callable[..., list[int]]
) -> None:
    sound = melody(2.6, 7)
    (output,) = run(engine, [AudioPrompt(sound, language="de", task="translate")], params(10_000))
    expected = reference(sound, None, language="de", task="translate")
    assert list(output.outputs[0].token_ids) == expected


def test_the_language_is_detected_once_in_the_first_window(
    engine: LLMEngine, reference: Callable[..., list[int]]
) -> None:
    for seed in range(4):
        sound = melody(5.0, 20 + seed)
        (output,) = run(engine, [AudioPrompt(sound)], params(9))
        assert list(output.outputs[0].token_ids) == reference(sound, 9, task="transcribe")


def test_a_window_and_a_few_samples_more_are_one_window(engine: LLMEngine) -> None:
    """The extra samples give no further frame, so no timestamps are needed."""
    sound = melody(2.0 + 20 / SAMPLING_RATE, 3)
    (output,) = run(engine, [AudioPrompt(sound, language="en")], params(6))
    (plain,) = run(engine, [AudioPrompt(sound[:-20], language="en")], params(6))
    assert output.prompt_token_ids == plain.prompt_token_ids
    assert output.num_prompt_tokens == 4


def test_files_hit_what_was_computed_for_their_samples(engine: LLMEngine, tmp_path: Path) -> None:
    samples = np.round(melody(5.0, 1) * 32767) / 32768
    path = tmp_path / "long.flac"
    soundfile.write(path, samples, SAMPLING_RATE, "PCM_16")
    engine.reset_prefix_cache()
    before = engine.stats()
    (first,) = run(engine, [AudioPrompt(samples.astype(np.float32), language="en")], params(12))
    middle = engine.stats()
    (again,) = run(engine, [AudioPrompt(path, language="en")], params(12))
    after = engine.stats()
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    num_windows = middle.encoder_runs - before.encoder_runs
    assert num_windows > 2
    assert (after.encoder_runs, after.encoder_hits) == (
        middle.encoder_runs,
        middle.encoder_hits + num_windows,
    )
    assert after.prompt_tokens - middle.prompt_tokens == num_windows * first.num_prompt_tokens


def test_a_stream_reports_a_window_when_it_has_ended(engine: LLMEngine, folder: str) -> None:
    prompt = AudioPrompt(melody(6.0, 5), language="en")
    (whole,) = run(engine, [prompt], params(12))
    outputs = list(engine.stream(prompt, params(12)))
    texts = [output.outputs[0].text for output in outputs]
    assert "".join(output.outputs[0].delta for output in outputs) == whole.outputs[0].text
    assert all(later.startswith(text) for text, later in pairwise(texts))
    ids = [output.outputs[0].token_ids for output in outputs]
    assert ids[0] == () and len(set(ids)) > 2
    assert all(whole.outputs[0].token_ids[: len(each)] == each for each in ids)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = tokenizer.decode(
        list(ids[-1]), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert outputs[-1].outputs[0].text == plain.rstrip("\N{REPLACEMENT CHARACTER}")


def test_rows_are_those_of_all_windows_and_logprobs_of_all_kept_tokens(engine: LLMEngine) -> None:
    prompt = AudioPrompt(melody(6.0, 5), language="en")
    before = engine.stats()
    (output,) = run(engine, [prompt], params(12, logprobs=1))
    num_windows = engine.stats().since(before).prompt_tokens // output.num_prompt_tokens
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
    rows = completion.tensors["hidden_states"].shape[0]
    most = num_windows * output.num_prompt_tokens + len(completion.token_ids)
    # The last kept token of a window may not have been run.
    assert most - num_windows <= rows <= most


def test_several_completions_differ_and_are_reproducible(engine: LLMEngine) -> None:
    prompt = AudioPrompt(melody(5.0, 2), language="en")
    sampling = SamplingParams(temperature=1.0, max_tokens=10, n=3, seed=3)
    (output,) = run(engine, [prompt], sampling)
    (again,) = run(engine, [prompt], sampling)
    ids = [completion.token_ids for completion in output.outputs]
    assert len(set(ids)) == 3
    assert ids == [completion.token_ids for completion in again.outputs]
    windows = np.array_split(np.array(ids[0]), 2)
    assert windows[0].tolist() != windows[1].tolist()


def test_a_stop_token_of_the_request_ends_the_whole_transcription(engine: LLMEngine) -> None:
    prompt = AudioPrompt(melody(6.0, 5), language="en")
    (whole,) = run(engine, [prompt], params(12))
    ids = list(whole.outputs[0].token_ids)
    stop = next(token for token in ids[len(ids) // 2 :] if ids.count(token) == 1)
    (output,) = run(engine, [prompt], params(12, stop_token_ids=(stop,)))
    assert list(output.outputs[0].token_ids) == ids[: ids.index(stop) + 1]
    assert output.outputs[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("language", "steps"), [("en", (1, 8, 20, 33)), (None, (0, 1, 2))])
def test_an_aborted_recording_leaves_nothing_behind(
    engine: LLMEngine, language: str | None, steps: tuple[int, ...]
) -> None:
    """Also before the language is known."""
    for num_steps in steps:
        engine.add_request("r", AudioPrompt(melody(9.0, 4), language=language), params(12))
        for _ in range(num_steps):
            engine.step()
        engine.abort("r")
        assert not engine.has_unfinished_requests
        engine.check_integrity()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Keep the garbage of other tests: finalizers would be interrupted as well."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_step_interrupted_at_the_end_of_a_window_gives_no_wrong_answer(engine: LLMEngine) -> None:
    prompt, sampling = AudioPrompt(melody(5.0, 5), language="en"), params(5)
    (expected,) = run(engine, [prompt], sampling)

    def steps(fault_at: int, nth: int) -> tuple[list[tuple[list[Event], int]], RequestOutput]:
        """Return for each step the lines that ran and the tokens after it; and the last output."""
        engine.reset_prefix_cache()
        engine.add_request("r", prompt, sampling)
        seen: list[tuple[list[Event], int]] = []
        last: list[RequestOutput] = []
        while engine.has_unfinished_requests:
            is_faulty = len(seen) == fault_at
            fault = LineFault(nth if is_faulty else -1)
            # The interruption's exception is raised; the engine starts the requests over.
            with suppress(*[Exception] * is_faulty), fault:
                last = list(engine.step()) or last
            seen.append((fault.events, len(last[-1].outputs[0].token_ids) if last else 0))
        return seen, last[-1]

    seen, whole = steps(-1, -1)
    assert whole.outputs[0].token_ids == expected.outputs[0].token_ids
    ends = [k for k in range(1, len(seen)) if seen[k][1] > seen[k - 1][1]]
    assert len(ends) > 2
    draw, went_on = random.Random(0), 0
    for _ in range(14):
        step = draw.choice(ends)
        ran = [code for code, _ in seen[step][0]]
        # Only after the forward pass, whose faults have tests of their own.
        nth = draw.randrange(ran.index(OutputProcessor.process.__code__), len(ran))
        _, output = steps(step, nth)
        engine.check_integrity()
        if output.error is None:
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            went_on += 1
        else:
            assert "interrupted" in output.error or "could not be taken" in output.error
    assert went_on < 14, "some were interrupted while their tokens were taken in"
    (again,) = run(engine, [prompt], sampling)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


def test_an_error_while_blocks_are_freed_is_raised(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add_request("r", AudioPrompt(melody(1.0, 5), language="en"), params(3))
    plain = PageArena.release
    given: list[object] = []

    def release(self: PageArena, *args: Any) -> None:
        given.append(args)
        if len(given) == 2:
            raise MemoryError
        plain(self, *args)

    monkeypatch.setattr(PageArena, "release", release)
    with pytest.raises(MemoryError):
        while engine.has_unfinished_requests:
            engine.step()
    engine.check_integrity()
    (output,) = engine.step()
    assert "interrupted" in str(output.error)


def test_short_and_long_ones_share_a_small_pool(folder: str, engine: LLMEngine) -> None:
    prompts = [
        AudioPrompt(melody(seconds, seed), language="en")
        for seed, seconds in enumerate((5.0, 1.0, 3.0, 0.5, 6.0))
    ]
    expected = run(engine, prompts, params(12))
    small = LLMEngine(
        EngineConfig(model=folder, num_blocks=42, block_size=8, max_num_seqs=3, dtype="float32")
    )
    for one, other in zip(run(small, prompts, params(12)), expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


WRONG: dict[str, tuple[Callable[[np.ndarray], Any], SamplingParams, str]] = {
    "no timestamps": (
        lambda s: AudioPrompt(s, timestamps=False),
        params(9),
        "is cut by its timestamps: leave timestamps out, or cut",
    ),
    "a decoder prompt": (
        lambda s: ExplicitEncoderDecoderPrompt(AudioPrompt(s), TokensPrompt((1, 2))),
        params(9),
        "a decoder prompt does not go with a recording that is longer",
    ),
    "no tokens": (AudioPrompt, params(0), "max_tokens is 0, but the input takes several windows"),
    "stop strings": (AudioPrompt, params(9, stop=("a",)), "stop strings do not go with"),
}


@pytest.mark.parametrize("case", WRONG)
def test_unsupported_options_of_a_long_recording_are_refused(engine: LLMEngine, case: str) -> None:
    make, sampling, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        engine.add_request("r", make(melody(3.0, 0)), sampling)
    assert not engine.has_unfinished_requests


FIRST, END = 100, 50


@pytest.mark.parametrize(
    ("tokens", "kept", "begin"),
    [
        ([FIRST, 1, 2, END], 3, 200),  # no end of a segment: all of the window
        ([FIRST, 1, FIRST + 30, END], 3, 200),  # speech ended there
        ([FIRST, 1, FIRST + 30, FIRST + 30, 2, 3], 4, 60),  # the second segment is unfinished
        ([FIRST, 1, FIRST + 9, FIRST + 9, 2, FIRST + 30, FIRST + 30, END], 7, 60),
        ([FIRST, 1, FIRST + 9, FIRST + 9, 2, FIRST + 30, END], 6, 200),
        ([1, 2], 2, 200),
        ([FIRST, FIRST, 1], 2, 200),  # never stands still
    ],
)
def test_a_window_is_kept_up_to_its_last_finished_segment(
    tokens: list[int], kept: int, begin: int
) -> None:
    made: list[torch.Tensor] = []

    def make(part: torch.Tensor) -> EncoderInput:
        made.append(part)
        return EncoderInput(100, b"")

    features = torch.arange(1, 351.0).expand(2, -1)
    windows = SpeechWindows(
        windows=InputWindows(features, 200, make, 350),
        begin=0,
        options=TranscriptionOptions(),
        first_timestamp_id=FIRST,
        end_token_id=END,
        start_token_id=51,
        vocab_size=200,
    )

    def written(tokens: list[int]) -> Any:
        return SimpleNamespace(output_token_ids=tokens, params=params(9), judgements=[])

    reason = FinishReason.STOP if tokens[-1] == END else FinishReason.LENGTH
    sequel = windows.follow(written(tokens), reason, None)
    assert sequel.num_kept == kept
    assert made[0].shape == (2, 200)
    assert made[0][0].tolist()[:150] == list(range(begin + 1, begin + 151))
    follower = sequel.continuation
    assert isinstance(follower, SpeechWindows) and follower.begin == begin
    if begin == 200:
        assert not made[0][0, 150:].any(), "what is behind the end is silence"
        last = follower.follow(written([FIRST, 1, END]), FinishReason.STOP, None)
        assert last.encoder_input is None


NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SOUNDS = [
    tone(0.3 + 0.2 * number, 150.0 * (number + 1), seed=number) * (0.2 if number % 2 else 1.0)
    for number in range(8)
]


@dataclass(frozen=True)
class Heard:
    """transformers' result for a sound without a given language."""

    samples: NDArray[np.float32]
    prompt: tuple[int, ...]
    token_ids: list[int]

    @property
    def language_id(self) -> int:
        return self.prompt[1]


@pytest.fixture(scope="module")
def known(folder: str) -> Any:
    return WhisperForConditionalGeneration.from_pretrained(folder).generation_config


@pytest.fixture(scope="module")
def heard(folder: str) -> list[Heard]:
    oracle = Oracle(folder)
    model = oracle.reference.model
    own = model.generation_config
    found = []
    for samples in SOUNDS:
        entry = oracle.read(Case(samples, (), ""))
        assert entry is not None
        features = entry.features["input_features"][None]
        (language,) = model.detect_language(features).tolist()
        transcribe, without = own.task_to_id["transcribe"], own.no_timestamps_token_id
        prompt = (own.decoder_start_token_id, language, transcribe, without)
        answer = oracle.answer(Case(samples, prompt, ""), NUM_TOKENS)
        found.append(Heard(samples, prompt, answer.token_ids))
    assert len({each.language_id for each in found}) > 1, "the sounds tell nothing apart"
    return found


def build(folder: str, **settings: Any) -> LLMEngine:
    chosen: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 256,
        "max_model_len": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    return LLMEngine(EngineConfig(model=folder, **chosen | settings))


def unnamed(each: Heard) -> AudioPrompt:
    return AudioPrompt(each.samples, task="transcribe")


def named(each: Heard, known: Any) -> AudioPrompt:
    (token,) = (name for name, id_ in known.lang_to_id.items() if id_ == each.language_id)
    return AudioPrompt(each.samples, language=token, task="transcribe")


def assert_same(found: RequestOutput, expected: RequestOutput) -> None:
    assert found.error is None
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.num_prompt_tokens == expected.num_prompt_tokens
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.tensors.keys() == other.tensors.keys()
        for name, rows in one.tensors.items():
            # The encoder's rounding depends on the batch, and these batches differ.
            torch.testing.assert_close(rows, other.tensors[name], atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 2, "max_num_seqs": 2},
        {"block_size": 1, "max_num_seqs": 1},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_the_language_and_the_tokens_are_those_of_transformers(
    folder: str, heard: list[Heard], settings: dict[str, Any]
) -> None:
    engine = build(folder, **settings)
    for _ in range(2):  # the second time the encoder's outputs are known
        outputs = engine.generate([unnamed(each) for each in heard], GREEDY)
        for output, each in zip(outputs, heard, strict=True):
            assert output.prompt_token_ids == each.prompt
            assert output.num_prompt_tokens == 4
            assert list(output.outputs[0].token_ids) == each.token_ids
    engine.check_integrity()


SAMPLING = {
    "drawn": SamplingParams(temperature=0.9, seed=3, max_tokens=NUM_TOKENS),
    "penalties": SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, repetition_penalty=1.7, presence_penalty=0.3
    ),
    "first tokens suppressed": SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, min_tokens=3, suppress_token_ids=(40, 41)
    ),
    "log-probabilities": SamplingParams(temperature=0.0, max_tokens=4, logprobs=2),
    "several": SamplingParams(temperature=0.9, seed=3, max_tokens=4, n=3),
    "nothing to generate": SamplingParams(max_tokens=0),
    "stop": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, stop=("a", "e")),
}


@pytest.fixture(scope="module")
def detecting(folder: str) -> LLMEngine:
    return build(folder)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_detected_language_gives_what_the_named_one_gives(
    detecting: LLMEngine, heard: list[Heard], known: Any, name: str
) -> None:
    params = SAMPLING[name]
    detecting.reset_prefix_cache()
    found = detecting.generate([unnamed(each) for each in heard], params)
    detecting.reset_prefix_cache()
    expected = detecting.generate([named(each, known) for each in heard], params)
    for one, other, each in zip(found, expected, heard, strict=True):
        assert one.prompt_token_ids[1] == each.language_id
        assert_same(one, other)
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            for left, right in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
                assert left.logprob == pytest.approx(right.logprob, abs=1e-4)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_changes_nothing(
    folder: str, heard: list[Heard], known: Any, preemption: str
) -> None:
    longer = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    roomy = build(folder, max_model_len=48).generate([named(e, known) for e in heard], longer)
    settings = {"block_size": 1, "num_blocks": 240, "max_model_len": 48, "max_num_seqs": 8}
    engine = build(folder, preemption=preemption, **settings)
    mixed = [unnamed(e) if i % 3 else named(e, known) for i, e in enumerate(heard)]
    for output, expected in zip(engine.generate(mixed, longer), roomy, strict=True):
        assert_same(output, expected)
    assert engine.stats().num_preemptions
    engine.check_integrity()


def test_a_step_that_fails_while_it_detects_changes_nothing(
    folder: str, heard: list[Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [unnamed(each) for each in heard[:3]]
    expected = build(folder).generate(prompts, GREEDY)
    engine, failures = build(folder), iter([True])
    sample = engine._runner._sample

    def fail_once(*arguments: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("once")
        return sample(*arguments)

    monkeypatch.setattr(engine._runner, "_sample", fail_once)
    for output, other in zip(engine.generate(prompts, GREEDY), expected, strict=True):
        assert_same(output, other)
    assert not list(failures)
    engine.check_integrity()


def test_nothing_is_put_out_before_the_language_is_known(folder: str, heard: list[Heard]) -> None:
    engine = build(folder)
    engine.add_request("a", unnamed(heard[0]), GREEDY)
    assert engine.step() == []
    (output,) = engine.step()
    assert output.num_prompt_tokens == 4
    assert len(output.outputs[0].token_ids) == 1
    assert engine.stats().prompt_tokens == 4


def test_room_is_counted_for_the_tokens_that_are_still_to_come(
    folder: str, heard: list[Heard]
) -> None:
    engine = build(folder, max_model_len=4)
    engine.generate(unnamed(heard[0]), SamplingParams(max_tokens=0))
    with pytest.raises(ValueError, match="the prompt has 4 tokens, and 1 to generate"):
        engine.generate(unnamed(heard[0]), SamplingParams(max_tokens=1))


RATE = 16_000
SHORT = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def vad_engine(seeded: Callable[[str], str]) -> LLMEngine:
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


@pytest.mark.parametrize("seconds", [0.002, 1.0, 5.0])
def test_silence_and_noise_give_no_text(vad_engine: LLMEngine, seconds: float):
    for samples in (np.zeros(round(seconds * RATE), np.float32), noise(seconds)):
        (output,) = completions(vad_engine.generate([AudioPrompt(samples, RATE)], SHORT))
        assert output.text == "" and output.finish_reason is FinishReason.STOP
        (output,) = completions(vad_engine.generate([AudioPrompt(samples, RATE, vad=False)], SHORT))
        assert len(output.token_ids) > 1


def test_speech_is_transcribed_as_if_the_rest_were_silence(vad_engine: LLMEngine):
    samples = np.concatenate([noise(0.5), question()[: RATE // 2], noise(0.5)])
    masked = np.zeros_like(samples)
    for begin, end in spoken_spans(samples, RATE):
        masked[begin:end] = samples[begin:end]
    assert masked.any() and not masked.all()
    heard, expected = completions(
        vad_engine.generate(
            [AudioPrompt(samples, RATE), AudioPrompt(masked, RATE, vad=False)], SHORT
        )
    )
    assert heard.token_ids == expected.token_ids


def test_windows_without_speech_are_skipped(vad_engine: LLMEngine):
    samples = np.concatenate([noise(9), question(), noise(9), question(), noise(9)])
    spans = [(begin / RATE, end / RATE) for begin, end in spoken_spans(samples, RATE)]
    (output,) = completions(vad_engine.generate([AudioPrompt(samples, RATE)], SHORT))
    begins = [each.begin_s for each in output.windows]
    assert begins == sorted(begins) and begins[0] == pytest.approx(spans[0][0], abs=0.02)
    for begin in begins:
        assert any(first - 0.02 <= begin < last for first, last in spans), (begin, spans)
    assert any(begin >= spans[1][0] - 0.02 for begin in begins)


class Written:
    """The attributes of a request that the repetition check reads."""

    def __init__(self, prompt: list[int], written: list[int], most: int | None) -> None:
        self.token_ids = prompt + written
        self.num_prompt_tokens = len(prompt)
        self.params = SamplingParams(max_repeats=most)


@given(
    st.lists(st.integers(0, 2), max_size=4),
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 4),
)
def test_repetitions_are_found_like_by_a_regular_expression(
    prompt: list[int], ids: list[int], most: int
):
    text = "".join(map(str, ids))
    is_loop = re.search(rf"(.{{1,20}})\1{{{most}}}$", text) is not None
    assert _is_repeating(Written(prompt, ids, most)) == is_loop
    assert not _is_repeating(Written(prompt, ids, None))


def test_a_loop_ends_the_text(vad_engine: LLMEngine):
    loop = SHORT.model_copy(update={"max_tokens": 30, "max_repeats": 4})
    forced = SamplingParams.model_validate({**loop.model_dump(), "logit_bias": {30: 100.0}})
    prompt = AudioPrompt(question()[:RATE], RATE, vad=False)
    (output,) = completions(vad_engine.generate([prompt], forced))
    assert output.token_ids == (30,) * 5 and output.finish_reason is FinishReason.LENGTH


VOCAB, END_ID, WITHOUT = 40, 20, 24


def ruled_by_transformers(
    generated: list[int], logits: torch.Tensor, max_first: int | None
) -> torch.Tensor:
    config: Any = GenerationConfig(eos_token_id=END_ID, bos_token_id=END_ID)
    config.no_timestamps_token_id = WITHOUT
    config.max_initial_timestamp_index = max_first
    prompt = [21, 22]
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt))
    return processor(torch.tensor([prompt + generated]), logits[None])[0]


@given(
    generated=st.lists(st.one_of(st.integers(0, END_ID), st.integers(WITHOUT + 1, VOCAB - 1))),
    seed=st.integers(0, 10**6),
    lift=st.floats(-4, 4),
    max_first=st.none() | st.integers(0, 9),
)
def test_the_same_is_masked_as_by_transformers(
    generated: list[int], seed: int, lift: float, max_first: int | None
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[WITHOUT + 1 :] += lift
    expected = ruled_by_transformers(generated, logits, max_first)
    found = logits.clone()
    TimestampRule(WITHOUT, END_ID, max_first).apply(found, generated)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_keeps_to_the_rule_of_each_row(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=0)
    ruled = SamplingState(
        params, (), 0, [END_ID], VOCAB, logits_processor=TimestampRule(WITHOUT, END_ID, 3)
    )
    free = SamplingState(params, (), 0, [END_ID], VOCAB)
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 30.0
    time, text = Sampler().sample(logits, [ruled, free]).token_ids
    assert time in range(WITHOUT + 1, WITHOUT + 1 + 3 + 1)
    assert text == 5
    ruled.append(time)
    assert Sampler().sample(logits, [ruled, free]).token_ids == [5, 5]
    ruled.append(5)
    logits[:, -1] = 40.0
    assert Sampler().sample(logits, [ruled, free]).token_ids == [VOCAB - 1] * 2
