"""Which edges can be streamed, and who may speak, is told before any work starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import CodecPrompt, EngineConfig, Prompt, SpeechPrompt
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniRequest
from stages import AutoregressiveStage, TransformContext, thinker_to_talker
from tests.support.fake_speech import FakeSpeechStage, Talker, Thinker
from tests.support.speech_pipeline import drain, speech_stages
from tests.support.whole_orchestrator import WholeOrchestrator


def test_the_speaker_reaches_the_talker() -> None:
    voices = {"speakers": ("Ada", "Ben")}
    stages = speech_stages((2, 3), talker=voices, code2wav=voices)
    orchestrator = WholeOrchestrator(Pipeline(stages, speaker="Ada"))
    orchestrator.add_request(OmniRequest("hello", "own", speaker="Ben"))
    orchestrator.add_request(OmniRequest("hello", "default"))
    drain(orchestrator)
    for request_id, speaker in (("own", "Ben"), ("default", "Ada")):
        for stage in stages[1:]:
            for prompt in stage.received[request_id]:
                assert isinstance(prompt, SpeechPrompt | CodecPrompt)
                assert prompt.speaker == speaker


def test_an_unknown_speaker_is_a_clear_error() -> None:
    stages = speech_stages(talker={"speakers": ("Chelsie", "Ethan")})
    orchestrator = WholeOrchestrator(Pipeline(stages))
    with pytest.raises(ValueError, match="'Chelsy': stage 'talker' has no .*; did you mean 'Che"):
        orchestrator.add_request(OmniRequest("p", "x", speaker="Chelsy"))
    assert not orchestrator.has_unfinished_requests
    with pytest.raises(ValueError, match="'Bob': stage 'talker' .*known are 'Chelsie', 'Ethan'"):
        Pipeline(stages, speaker="Bob")
    with pytest.raises(ValueError, match="'Bob': none of the stages .'thinker'.* speaks"):
        Pipeline([Thinker("thinker")], speaker="Bob")
    with pytest.raises(ValueError, match="speaker must be"):
        OmniRequest("p", speaker=3)  # type: ignore[arg-type]


class Deaf(Talker):
    @property
    def takes_chunks(self) -> bool:
        return False


class Closed(Thinker):
    @property
    def gives_chunks(self) -> bool:
        return False


def unmarked(context: TransformContext) -> Prompt:
    return thinker_to_talker(context)


TO_TALKER = "thinker_to_talker"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [Thinker("a"), Thinker("b"), Talker("c", ("a", "b"), TO_TALKER, chunk_size=2)],
            "stage 'c': inputs.chunk_size: is for one source, got 2",
        ),
        (
            [Closed("a"), Talker("b", "a", TO_TALKER, chunk_size=2)],
            "stage 'b': inputs.chunk_size: needs a source that generates tokens; 'a'",
        ),
        (
            [Thinker("a"), Deaf("b", "a", TO_TALKER, chunk_size=2)],
            "stage 'b': inputs.chunk_size: is not for a",
        ),
        (
            [Thinker("a"), Talker("b", "a", "text_as_prompt", chunk_size=2)],
            "stage 'b': inputs.chunk_size: needs a transform .* which 'text_as_prompt'",
        ),
        ([Thinker("a"), Talker("b", "a", unmarked, chunk_size=2)], "which 'unmarked' does not"),
        ([Thinker("a"), Talker("b", "a", TO_TALKER, chunk_size=0)], "chunk_size: must .* got 0"),
        (
            [Thinker("a"), Talker("b", "a", TO_TALKER, chunk_size=1, max_pending=0)],
            "stage 'b': inputs.max_pending_chunks: must be an integer of at least 1, got 0",
        ),
    ],
)
def test_an_edge_that_cannot_be_streamed_is_refused(
    stages: list[FakeSpeechStage], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Pipeline(stages)


def test_the_output_of_an_encoder_decoder_cannot_be_streamed(seeded: Callable[[str], str]) -> None:
    engine = EngineConfig(model=seeded("whisper"), block_size=16, num_blocks=64)
    hears = AutoregressiveStage("hears", engine)
    with pytest.raises(ValueError, match="needs a source that generates tokens; 'hears'"):
        Pipeline([hears, Talker("speaks", "hears", TO_TALKER, chunk_size=2)])
    Pipeline([hears, Talker("speaks", "hears", TO_TALKER)])
