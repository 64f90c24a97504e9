"""Utterances become sound, whole or in windows, independent of batches and of chunks of codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedConfig

from engine import (
    Checkpoint,
    CodeChunk,
    CodecPrompt,
    GenerationParams,
    GeneratorConfig,
    GeneratorEngine,
    GeneratorModel,
    GeneratorOutput,
    ModelFamily,
    StreamWindow,
    TokensPrompt,
    register_model_family,
)
from engine.generator.generator_engine import GeneratorRequest, WindowSizes, gather_windows
from engine.models.qwen2_5_omni.code2wav import flow_times
from engine.models.registry import FAMILIES
from prefix_cache import IntegrityError
from tests.support.examples import examples
from tests.support.idle_engine import drop_all
from tests.support.model_trial import TRIALS
from tests.support.vocoder_reference import VocoderReference, random_codes

ATOL = 1e-6
BLOCK = 4
SAMPLES_PER_CODE = 480
PARAMS = GenerationParams(num_steps=2, window=StreamWindow(first_blocks=2, chunk_blocks=2))
GROWING = GenerationParams(num_steps=2, window=StreamWindow(chunk_blocks=4))
# Codes that fit into the first window: a chunk of two blocks and one block to its right.
FIRST_WINDOW = 3 * BLOCK


@pytest.fixture(scope="module")
def folder(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_omni")


@pytest.fixture(scope="module")
def reference(folder: str) -> VocoderReference:
    return VocoderReference(folder)


def open_engine(folder: str, params: GenerationParams = PARAMS, **options: Any) -> GeneratorEngine:
    return GeneratorEngine(
        GeneratorConfig(model=folder, part="code2wav", device="cpu", generation=params, **options)
    )


@pytest.fixture(scope="module")
def shared_engine(folder: str) -> GeneratorEngine:
    return open_engine(folder)


@pytest.fixture
def engine(shared_engine: GeneratorEngine) -> GeneratorEngine:
    drop_all(shared_engine)
    return shared_engine


def drain(engine: GeneratorEngine) -> dict[str, list[GeneratorOutput]]:
    """Step until nothing runs or waits; return all outputs by request."""
    outputs: dict[str, list[GeneratorOutput]] = {}
    while stepped := engine.step() or engine.step():
        engine.check_integrity()
        for output in stepped:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def whole(engine: GeneratorEngine, codes: Sequence[Any], **options: Any) -> Tensor:
    engine.add_request("whole", CodecPrompt(tuple(codes), **options))
    (output,) = drain(engine)["whole"]
    assert output.finished and output.error is None and output.num_codes == len(codes)
    assert torch.equal(output.waveform.samples, output.delta.samples)
    return output.waveform.samples


def streamed(
    engine: GeneratorEngine,
    codes: Sequence[Any],
    cuts: Sequence[int],
    *,
    eager: bool = True,
    speaker: str | None = None,
) -> Tensor:
    """Send codes in chunks cut at ``cuts``; if ``eager``, step between the chunks."""
    bounds = [0, *sorted(cuts), len(codes)]
    outputs: list[GeneratorOutput] = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        # Never the last: a separate empty chunk ends the codes.
        prompt = CodecPrompt(tuple(codes[start:stop]), speaker, is_last=False)
        if index == 0:
            engine.add_request("s", prompt)
        else:
            engine.extend_request("s", prompt)
        if eager:
            outputs += drain(engine).get("s", [])
            assert engine.needs_input("s")
    engine.extend_request("s", CodecPrompt((), is_last=True))
    assert not engine.needs_input("s")
    outputs += drain(engine)["s"]
    assert "s" not in engine.live_request_ids
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    joined = torch.cat([output.delta.samples for output in outputs])
    assert torch.equal(outputs[-1].waveform.samples, joined)
    return joined


def test_whole_utterances_equal_transformers_and_equal_lengths_run_together(
    engine: GeneratorEngine, reference: VocoderReference
) -> None:
    before = engine.stats().num_steps
    utterances = {
        f"r{i}": (random_codes(length, i), name)
        for i, (length, name) in enumerate(
            [(14, "Chelsie"), (9, "Ethan"), (14, "Ethan"), (14, None), (9, "Chelsie")]
        )
    }
    for request_id, (codes, speaker) in utterances.items():
        engine.add_request(request_id, CodecPrompt(codes, speaker))
    outputs = drain(engine)
    assert engine.stats().num_steps - before == 2
    for request_id, (codes, speaker) in utterances.items():
        waveform = outputs[request_id][-1].waveform
        assert waveform.sampling_rate == 24_000
        expected = reference.waveform(codes, PARAMS, speaker or "Chelsie")
        torch.testing.assert_close(waveform.samples, expected, atol=ATOL, rtol=0)
    assert not engine.has_unfinished_requests


@pytest.fixture(scope="module", params=[PARAMS, GROWING], ids=["even windows", "growing windows"])
def windowed(folder: str, request: pytest.FixtureRequest) -> GeneratorEngine:
    return open_engine(folder, request.param)


@settings(max_examples=examples(15))
@given(data=st.data(), length=st.integers(0, 75), eager=st.booleans())
def test_streamed_sound_does_not_depend_on_the_chunks_of_codes(
    windowed: GeneratorEngine, data: st.DataObject, length: int, eager: bool
) -> None:
    drop_all(windowed)
    codes = random_codes(length)
    cuts = data.draw(st.lists(st.integers(0, length), max_size=8))
    expected = streamed(windowed, codes, [])
    assert expected.shape == (length * SAMPLES_PER_CODE,)
    assert torch.equal(streamed(windowed, codes, cuts, eager=eager), expected)


@pytest.mark.parametrize(
    ("window", "lengths"),
    [
        (GROWING.window, [1, 2, 4, 4, 5]),
        (StreamWindow(growth=4), [1, 4, 8, 3]),
        (StreamWindow(first_blocks=2, growth=3), [2, 6, 8]),
    ],
    ids=str,
)
def test_windows_grow_to_their_maximum(
    window: StreamWindow, lengths: list[int], folder: str
) -> None:
    engine = open_engine(folder, PARAMS.model_copy(update={"window": window}))
    engine.add_request("s", CodecPrompt(random_codes(BLOCK * 16), is_last=False))
    engine.extend_request("s", CodecPrompt(()))
    outputs = drain(engine)["s"]
    kept = [len(output.delta.samples) // SAMPLES_PER_CODE // BLOCK for output in outputs]
    # The last window takes the rest, including the block to its right.
    assert kept == lengths


VOCODERS = ("code2wav", "qwen3 code2wav", "csm mimi", "pocket_tts codec")


@pytest.mark.parametrize("name", VOCODERS)
def test_quantized_layers_give_nearly_the_same_sound(
    name: str, seeded: Callable[[str], str]
) -> None:
    trial, sounds = TRIALS[name], []
    forms: tuple[Literal["int8", "int4"] | None, ...] = (None, "int8", "int4")
    for form in forms:
        config = GeneratorConfig(
            model=seeded(trial.seeded), part=trial.part, device="cpu", quantization=form
        )
        engine = GeneratorEngine(config)
        assert trial.prompt is not None
        engine.add_request("one", trial.prompt())
        *_, output = drain(engine)["one"]
        assert output.waveform is not None, output.error
        sounds.append(output.waveform.samples)
    exact, eight, four = sounds
    assert 0 < (eight - exact).norm() / exact.norm() < 0.01
    assert (eight - exact).norm() < (four - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("first", [3, 9])
def test_the_first_window_cannot_be_larger_than_the_others(first: int) -> None:
    with pytest.raises(ValueError, match=rf"first_blocks \({first}\) must not be larger"):
        StreamWindow(first_blocks=first, chunk_blocks=2)


@pytest.mark.parametrize("length", [1, BLOCK, FIRST_WINDOW - 1, FIRST_WINDOW])
def test_streamed_sound_within_the_first_window_equals_the_whole(
    engine: GeneratorEngine, length: int
) -> None:
    codes = random_codes(length)
    assert torch.equal(streamed(engine, codes, range(length)), whole(engine, codes))


def test_streamed_sound_approaches_the_whole_with_wider_windows(folder: str) -> None:
    codes = random_codes(61)
    errors = []
    for left, right in ((0, 0), (1, 1), (2, 1), (4, 2), (8, 8)):
        window = StreamWindow(chunk_blocks=1, left_blocks=left, right_blocks=right)
        engine = open_engine(folder, PARAMS.model_copy(update={"window": window}))
        expected = whole(engine, codes)
        difference = streamed(engine, codes, [20, 40]) - expected
        errors.append(float(difference.norm() / expected.norm()))
    assert errors == sorted(errors, reverse=True)
    # Half off without margins, a percent with the default ones, rounding errors with wide ones.
    assert errors[0] > 0.1
    assert errors[2] < 0.01
    assert errors[4] < 1e-5


def test_streams_that_run_together_do_not_mix(engine: GeneratorEngine) -> None:
    utterances = {f"r{i}": random_codes(length, i) for i, length in enumerate((40, 31, 5, 40))}
    expected = {}
    for request_id, codes in utterances.items():
        expected[request_id] = streamed(engine, codes, [])
    pieces: dict[str, list[Tensor]] = {request_id: [] for request_id in utterances}
    for request_id in utterances:
        engine.add_request(request_id, CodecPrompt((), is_last=False))
    engine.add_request("whole", CodecPrompt(random_codes(20)))
    for start in range(0, 48, 8):
        for request_id, codes in utterances.items():
            engine.extend_request(
                request_id, CodecPrompt(codes[start : start + 8], is_last=start == 40)
            )
        for request_id, outputs in drain(engine).items():
            pieces.setdefault(request_id, []).extend(o.delta.samples for o in outputs)
    assert not engine.has_unfinished_requests
    for request_id, samples in expected.items():
        torch.testing.assert_close(torch.cat(pieces[request_id]), samples, atol=ATOL, rtol=0)


def test_equal_windows_of_several_streams_run_in_one_pass(engine: GeneratorEngine) -> None:
    for index in range(3):
        engine.add_request(f"r{index}", CodecPrompt(random_codes(13, index), is_last=False))
    assert {output.request_id for output in engine.step()} == {"r0", "r1", "r2"}
    assert engine.step() == []


def test_input_is_needed_exactly_if_nothing_can_run(engine: GeneratorEngine) -> None:
    codes = random_codes(FIRST_WINDOW + 1)
    engine.add_request("s", CodecPrompt(codes[:-1], is_last=False))
    # A code beyond the window shows that the window is not the last.
    assert engine.needs_input("s") and engine.step() == []
    engine.extend_request("s", CodecPrompt(codes[-1:], is_last=False))
    assert not engine.needs_input("s")
    (output,) = engine.step()
    assert not output.finished and output.waveform is None
    assert output.delta.samples.shape == (2 * BLOCK * SAMPLES_PER_CODE,)
    assert engine.needs_input("s") and engine.has_unfinished_requests


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "code beyond the codec": (CodecPrompt((1, 264)), "code 1 is 264, but .* codes 0 to 263"),
    "negative code": (CodecPrompt((-1,)), "code 0 is -1"),
    "no integers": (CodecPrompt((1.5,)), "codes must be integers"),
    "no sequence": (CodecPrompt(7), "codes must be integers"),
    "too many": (CodecPrompt((1,) * 16_385), "16385 codes; this generator takes 16384"),
    "unknown speaker": (CodecPrompt((1,), "Ethen"), "did you mean 'Ethan'"),
    "speaker without a name": (CodecPrompt((1,), 3), "chosen by name, got int"),
    "another prompt": (TokensPrompt((1,)), "reads a CodecPrompt, got TokensPrompt"),
    "text": ("hello", "reads a CodecPrompt, got str"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_alone(engine: GeneratorEngine, case: str) -> None:
    prompt, message = BAD_PROMPTS[case]
    engine.add_request("good", CodecPrompt(random_codes(5)))
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt)
    assert set(drain(engine)) == {"good"}
    assert not engine.has_unfinished_requests


def test_a_bad_chunk_does_not_change_the_stream(engine: GeneratorEngine) -> None:
    codes = random_codes(10)
    expected = whole(engine, codes)
    engine.add_request("s", CodecPrompt(codes[:5], "Chelsie", is_last=False))
    for chunk, message in (
        (CodecPrompt((300,)), "code 5 is 300"),
        (CodecPrompt((1,), "Ethan"), "speaks as 'Chelsie'.* cannot go on as 'Ethan'"),
        (CodecPrompt((1,) * 16_380), "16385 codes"),
        (TokensPrompt((1,)), "reads a CodecPrompt"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.extend_request("s", chunk)
    engine.extend_request("s", CodecPrompt(codes[5:], "Chelsie"))
    with pytest.raises(ValueError, match="its last chunk came"):
        engine.extend_request("s", CodecPrompt((1,)))
    (output,) = drain(engine)["s"]
    assert torch.equal(output.waveform.samples, expected)


def test_a_request_that_fails_in_a_batch_fails_alone(
    engine: GeneratorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(engine, random_codes(6))
    forward = engine._model.forward

    def fragile(codes: Tensor, *rest: Any) -> Tensor:
        if (codes == 255).any():
            raise RuntimeError("a device gave up")
        return forward(codes, *rest)

    monkeypatch.setattr(engine._model, "forward", fragile)
    engine.add_request("bad", CodecPrompt((255,) * 6))
    engine.add_request("good", CodecPrompt(random_codes(6)))
    outputs = drain(engine)
    (failed,) = outputs["bad"]
    assert failed.finished and failed.waveform is None and failed.delta is None
    assert failed.error == "the generator failed: RuntimeError: a device gave up"
    assert torch.equal(outputs["good"][-1].waveform.samples, expected)
    assert not engine.has_unfinished_requests


def test_the_first_of_the_highest_priority_runs_first(folder: str) -> None:
    engine = open_engine(folder, max_batch_size=1)
    for request_id, priority in (("late", 1), ("first", 0), ("second", 0)):
        engine.add_request(request_id, CodecPrompt((1, 2)), priority=priority)
    assert list(drain(engine)) == ["first", "second", "late"]


def test_an_aborted_request_is_removed_and_others_finish(engine: GeneratorEngine) -> None:
    codes = random_codes(20)
    expected = streamed(engine, codes, [])
    for request_id in ("kept", "dropped"):
        engine.add_request(request_id, CodecPrompt(codes[:15], is_last=False))
    assert len(engine.step()) == 2
    engine.abort("dropped")
    engine.extend_request("kept", CodecPrompt(codes[15:]))
    outputs = drain(engine)
    assert set(outputs) == {"kept"}
    torch.testing.assert_close(outputs["kept"][-1].waveform.samples, expected, atol=ATOL, rtol=0)


def test_lost_sound_fails_the_integrity_check(engine: GeneratorEngine) -> None:
    engine.add_request("s", CodecPrompt(random_codes(20), is_last=False))
    engine.step()
    engine.check_integrity()
    engine._live["s"].pieces.pop()
    with pytest.raises(IntegrityError, match=r"0 samples != 8 of 20 codes \* 480"):
        engine.check_integrity()


def test_generated_codes_are_counted(engine: GeneratorEngine) -> None:
    before = engine.stats().prompt_tokens
    streamed(engine, random_codes(30), [7])
    whole(engine, random_codes(9))
    assert engine.stats().prompt_tokens - before == 39


def test_a_window_wider_than_the_model_is_refused(folder: str) -> None:
    params = GenerationParams(window=StreamWindow(chunk_blocks=5_000))
    with pytest.raises(ValueError, match="window of 20012 codes is wider than the 16384 codes"):
        open_engine(folder, params)


def test_a_part_must_be_named_and_must_be_a_vocoder(folder: str) -> None:
    with pytest.raises(ValueError, match="several models.*code2wav"):
        GeneratorEngine(GeneratorConfig(model=folder))
    with pytest.raises(ValueError, match="is a Qwen2_5OmniTalker"):
        GeneratorEngine(GeneratorConfig(model=folder, part="talker"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_steps": 1},
        {"guidance_scale": -0.1},
        {"guidance_scale": float("nan")},
        {"sway_coefficient": -1.1},
        {"sway_coefficient": 1.8},
        {"seed": -1},
        {"window": {"chunk_blocks": 0}},
        {"steps": 4},
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        GenerationParams(**wrong)


@pytest.mark.parametrize("sway", [None, -1.0, 0.0, 1.75])
def test_flow_times_never_decrease_within_the_bounds_of_the_sway(sway: float | None) -> None:
    params = GenerationParams(sway_coefficient=sway, num_steps=200)
    times = flow_times(params, torch.device("cpu"))
    assert times[0] == 0 and abs(times[-1] - 1) < 1e-6
    assert (times.diff() >= 0).all()


SIZES = WindowSizes(first=4, chunk=8, growth=2, left=2, right=2)
FIRST, SECOND = 7, 15  # codes after which an utterance's windows can run


@dataclass
class Vocoder:
    """Utterances by name; each step returns the names of those in its batch."""

    max_batch_size: int = 8
    utterances: dict[str, GeneratorRequest] = field(default_factory=dict)
    has_new_codes: bool = False

    def say(self, name: str, num_codes: int, *, is_last: bool = False) -> None:
        request = self.utterances.setdefault(
            name, GeneratorRequest(name, None, 0, len(self.utterances), False, None)
        )
        request.codes += [0] * num_codes
        request.is_last = is_last
        self.has_new_codes = True

    def step(self) -> str:
        utterances = self.utterances.values()
        batch = gather_windows(
            utterances, SIZES, self.max_batch_size, has_new_codes=self.has_new_codes
        )
        self.has_new_codes = False
        for request, window in batch:
            request.num_done = window.kept_stop
        assert len({window.num_codes for _, window in batch}) <= 1
        return "".join(request.request_id for request, _ in batch)


def test_a_window_waits_for_another_of_equal_length() -> None:
    vocoder = Vocoder()
    vocoder.say("a", FIRST)
    vocoder.say("b", FIRST - 1)
    assert vocoder.step() == ""
    vocoder.say("b", 1)
    assert vocoder.step() == "ab"


@pytest.mark.parametrize(("num_codes", "expected"), [(FIRST, 2), (SECOND, 8)])
def test_waiting_is_bounded(num_codes: int, expected: int) -> None:
    vocoder = Vocoder()
    vocoder.say("a", num_codes)
    if num_codes == SECOND:
        assert vocoder.step() == "a"  # its first window
        vocoder.utterances["b"] = GeneratorRequest("b", None, 0, 1, False, None)
        vocoder.utterances["b"].num_done = SIZES.first
        vocoder.utterances["b"].codes = [0] * SIZES.first
    else:
        vocoder.say("b", 0)
    num_waits = 0
    # The other one keeps getting codes but never has a window that can run.
    vocoder.has_new_codes = True
    while vocoder.step() == "":
        num_waits += 1
        vocoder.has_new_codes = True
    assert num_waits == expected


Arrival = tuple[int, int, bool]


@settings(max_examples=examples(50))
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.booleans())), max_size=30)
)
def test_all_windows_run_in_the_end(turns: list[list[Arrival]]) -> None:
    vocoder = Vocoder(max_batch_size=3)
    for turn in turns:
        for index, num_codes, is_last in turn:
            name = "abcdef"[index]
            if name not in vocoder.utterances or not vocoder.utterances[name].is_last:
                vocoder.say(name, num_codes, is_last=is_last)
        vocoder.step()
        assert all(request.num_waits <= 8 + 6 for request in vocoder.utterances.values())
    # Without new codes, only the first of these steps may compute nothing.
    vocoder.step()
    while vocoder.step():
        pass
    for request in vocoder.utterances.values():
        assert request.next_window(SIZES) is None
        assert request.is_done or not request.is_last


NUM_CODES, SAMPLES = 16, 3


class EchoConfig(PreTrainedConfig):
    model_type = "made_up_echo"


class Echo(GeneratorModel):
    """Generator whose samples are half the previous sample plus a term of the current codes."""

    sampling_rate = 8_000
    samples_per_code = SAMPLES
    max_codes = 64
    num_codes = NUM_CODES
    num_codebooks = 2
    speakers = ("low", "high")

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def choose_speaker(self, name: str | None) -> str:
        if name is not None and name not in self.speakers:
            raise ValueError(f"unknown speaker {name!r}")
        return name or "low"

    def new_state(self) -> Tensor:
        return torch.zeros(())

    def generate(
        self, chunks: Sequence[CodeChunk], params: GenerationParams
    ) -> tuple[Tensor, Sequence[Any]]:
        made = [self.echo(chunk) for chunk in chunks]
        return torch.stack([samples for samples, _ in made]), [state for _, state in made]

    def echo(self, chunk: CodeChunk) -> tuple[Tensor, Tensor]:
        if (chunk.codes == NUM_CODES - 1).all(dim=1).any():
            raise RuntimeError("out of tune")
        level, samples = chunk.state, []
        loudness = 0.01 if chunk.speaker == "low" else 0.02
        for coarse, fine in chunk.codes.tolist():
            for _ in range(SAMPLES):
                level = 0.5 * level + loudness * (coarse + fine / NUM_CODES)
                samples.append(level)
        return torch.stack(samples), level


ECHO = ModelFamily("echo", ("EchoModel",), generator=Echo, config_class=EchoConfig)


@pytest.fixture
def echo_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GeneratorEngine:
    monkeypatch.setattr(FAMILIES, "_added", {})
    register_model_family(ECHO)
    EchoConfig(architectures=["EchoModel"]).save_pretrained(tmp_path)
    return GeneratorEngine(GeneratorConfig(model=str(tmp_path), device="cpu"))


codes_of_frame = st.tuples(st.integers(0, NUM_CODES - 2), st.integers(0, NUM_CODES - 1))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(codes=st.lists(codes_of_frame, min_size=1, max_size=64), cuts=st.lists(st.integers(0, 64)))
def test_a_model_with_state_streams_the_same_sound(
    echo_engine: GeneratorEngine, codes: list[tuple[int, int]], cuts: list[int]
) -> None:
    expected = whole(echo_engine, codes, speaker="high")
    assert expected.shape == (len(codes) * SAMPLES,)
    echo_engine.add_request("neighbour", CodecPrompt(((1, 2),) * 5, is_last=False))
    cuts = [min(cut, len(codes)) for cut in cuts]
    assert torch.equal(streamed(echo_engine, codes, cuts, speaker="high"), expected)
    drop_all(echo_engine)


def test_a_model_with_state_needs_no_margins_of_windows(echo_engine: GeneratorEngine) -> None:
    assert echo_engine.describe()["window"].endswith("with 0 before and 0 after")
    echo_engine.add_request("s", CodecPrompt(((1, 2), (3, 4)), is_last=False))
    assert not echo_engine.needs_input("s")
    assert len(drain(echo_engine)["s"][0].delta.samples) == SAMPLES


def test_a_state_is_unchanged_if_another_request_fails(echo_engine: GeneratorEngine) -> None:
    codes = ((1, 2), (3, 4), (5, 6))
    expected = whole(echo_engine, codes)
    for request_id, last in (("good", (5, 6)), ("bad", (NUM_CODES - 1,) * 2)):
        echo_engine.add_request(request_id, CodecPrompt(codes[:2], is_last=False))
        echo_engine.extend_request(request_id, CodecPrompt((last,), is_last=True))
    outputs = [output for _ in range(4) for output in echo_engine.step()]
    (failed,) = [output for output in outputs if output.error is not None]
    assert failed.request_id == "bad"
    assert failed.error == "the generator failed: RuntimeError: out of tune"
    (good,) = [o for o in outputs if o.request_id == "good" and o.finished]
    assert torch.equal(good.waveform.samples, expected)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (CodecPrompt((1, 2)), "codes must be integers"),
        (CodecPrompt(((1, 2, 3),)), "takes 2 codes for each place, one of each codebook, got 3"),
        (CodecPrompt(((1, 2), (1, NUM_CODES))), "code 1 is 16, but the generator knows codes 0 to"),
        (CodecPrompt(((1, 2),) * 65), "takes 64 at most"),
        (CodecPrompt(((1, 2),), speaker="nobody"), "unknown speaker 'nobody'"),
    ],
)
def test_bad_codes_of_several_codebooks_are_refused(
    echo_engine: GeneratorEngine, prompt: CodecPrompt, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        echo_engine.add_request("bad", prompt)
    assert not echo_engine.has_unfinished_requests
