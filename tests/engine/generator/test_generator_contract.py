"""A made-up vocoder of two codebooks that keeps a state: streamed speech is that of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

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
    ModelFamily,
    register_model_family,
)
from engine.models.registry import FAMILIES
from tests.support.idle_engine import drop_all

NUM_CODES, SAMPLES = 16, 3


class EchoConfig(PreTrainedConfig):
    model_type = "made_up_echo"


class Echo(GeneratorModel):
    """Each sample is half of the one before it, and what the codes of its place add."""

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
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GeneratorEngine:
    monkeypatch.setattr(FAMILIES, "_added", {})
    register_model_family(ECHO)
    EchoConfig(architectures=["EchoModel"]).save_pretrained(tmp_path)
    return GeneratorEngine(GeneratorConfig(model=str(tmp_path), device="cpu"))


def drain(engine: GeneratorEngine) -> dict[str, list[Tensor]]:
    """Step until nothing moves or waits; all pieces of sound by request."""
    pieces: dict[str, list[Tensor]] = {}
    while outputs := engine.step() or engine.step():
        engine.check_integrity()
        for output in outputs:
            assert output.error is None, output.error
            pieces.setdefault(output.request_id, []).append(output.delta.samples)
    return pieces


def whole(engine: GeneratorEngine, codes: Any, **options: Any) -> Tensor:
    engine.add_request("whole", CodecPrompt(tuple(codes), **options))
    (samples,) = drain(engine)["whole"]
    return samples


place = st.tuples(st.integers(0, NUM_CODES - 2), st.integers(0, NUM_CODES - 1))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(codes=st.lists(place, min_size=1, max_size=64), cuts=st.lists(st.integers(0, 64)))
def test_streamed_speech_is_that_of_the_whole(
    engine: GeneratorEngine, codes: list[tuple[int, int]], cuts: list[int]
) -> None:
    expected = whole(engine, codes, speaker="high")
    assert expected.shape == (len(codes) * SAMPLES,)
    bounds = [0, *sorted(min(cut, len(codes)) for cut in cuts), len(codes)]
    pieces: list[Tensor] = []
    neighbour = CodecPrompt(((1, 2),) * 5, is_last=False)
    engine.add_request("neighbour", neighbour)
    for number, (start, stop) in enumerate(pairwise(bounds)):
        prompt = CodecPrompt(tuple(codes[start:stop]), speaker="high", is_last=False)
        if number == 0:
            engine.add_request("s", prompt)
        else:
            engine.extend_request("s", prompt)
        pieces += drain(engine).get("s", [])
    engine.extend_request("s", CodecPrompt((), is_last=True))
    pieces += drain(engine)["s"]
    assert torch.equal(torch.cat(pieces), expected)
    drop_all(engine)


def test_windows_need_nothing_at_their_sides(engine: GeneratorEngine) -> None:
    assert engine.describe()["window"].endswith("with 0 before and 0 after")
    engine.add_request("s", CodecPrompt(((1, 2), (3, 4)), is_last=False))
    assert not engine.needs_input("s")
    assert len(drain(engine)["s"][0]) == SAMPLES


def test_a_state_is_as_it_was_when_a_neighbour_fails(engine: GeneratorEngine) -> None:
    codes = ((1, 2), (3, 4), (5, 6))
    expected = whole(engine, codes)
    for request_id, last in (("good", (5, 6)), ("bad", (NUM_CODES - 1,) * 2)):
        engine.add_request(request_id, CodecPrompt(codes[:2], is_last=False))
        engine.extend_request(request_id, CodecPrompt((last,), is_last=True))
    outputs = [output for _ in range(4) for output in engine.step()]
    (failed,) = [output for output in outputs if output.error is not None]
    assert (failed.request_id, failed.error) == (
        "bad",
        "the generator failed: RuntimeError: out of tune",
    )
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
def test_what_does_not_fit_is_refused(
    engine: GeneratorEngine, prompt: CodecPrompt, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt)
    assert not engine.has_unfinished_requests
