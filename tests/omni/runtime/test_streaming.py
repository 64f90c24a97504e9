"""Chunks change when things happen, not the outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from engine import CodecPrompt, EngineConfig, Prompt, SpeechPrompt
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniRequest
from omni.runtime import orchestrator as orchestrator_module
from stages import (
    AutoregressiveStage,
    StageOutput,
    TransformContext,
    chunkable,
    talker_to_code2wav,
    thinker_to_talker,
)
from stages.remote import worker
from stages.trace_events import Traced
from stages.worker.messages import Event, Output
from stages.worker.stage_worker import StageWorker
from tests.support.fake_speech import FakeSpeechStage, Talker, Thinker
from tests.support.placed import everywhere, over_every_transport
from tests.support.speech_pipeline import (
    PROMPTS,
    drain,
    run,
    speech_stages,
    start,
    text_and_sound,
    until,
    whole,
)
from tests.support.whole_orchestrator import WholeOrchestrator


class WaitingChunks:
    """Counts the chunks that reach a stage, and those that it consumes. ::

        waiting = WaitingChunks(talker_to_code2wav)
        stages = speech_stages((1, 2), code2wav={"transform": waiting.transform})
        waiting.stage = stages[2]

    It counts in the thread that drives the stage.
    """

    stage: FakeSpeechStage

    def __init__(self, transform: Callable[[TransformContext], Prompt]) -> None:
        self._came: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

        @chunkable
        def counted(context: TransformContext) -> Prompt:
            request_id = context.request_id
            self._came[request_id] += 1
            self.most[request_id] = max(self.most[request_id], self.now(request_id))
            return transform(context)

        self.transform = counted

    def now(self, request_id: str) -> int:
        """Return how many chunks of a request wait; its first, with which it enters, never does."""
        taken = len(self.stage.received.get(request_id, ()))
        return max(0, self._came[request_id] - max(1, taken))


@over_every_transport
def test_a_chunks_prompts_joined_are_the_whole_prompt() -> None:
    streamed, unstreamed = speech_stages((2, 3)), speech_stages((None, None))
    run(streamed), run(unstreamed)
    for request_id in PROMPTS:
        speech = [as_speech(prompt) for prompt in streamed[1].received[request_id]]
        (expected,) = map(as_speech, unstreamed[1].received[request_id])
        assert len(speech) > 1 or request_id == "y"
        assert [prompt.is_last for prompt in speech] == [False] * (len(speech) - 1) + [True]
        for part in ("prompt_rows", "reply_rows"):
            parts: list[Tensor] = [getattr(prompt, part) for prompt in speech]
            assert torch.equal(torch.cat(parts), getattr(expected, part))
        assert speech[0].positions is not None and expected.positions is not None
        assert torch.equal(speech[0].positions, expected.positions)
        codes = [as_codec(prompt) for prompt in streamed[2].received[request_id]]
        (all_codes,) = map(as_codec, unstreamed[2].received[request_id])
        assert sum((prompt.codes for prompt in codes), ()) == all_codes.codes
        assert [prompt.is_last for prompt in codes] == [False] * (len(codes) - 1) + [True]


def as_speech(prompt: Prompt) -> SpeechPrompt:
    assert isinstance(prompt, SpeechPrompt)
    return prompt


def as_codec(prompt: Prompt) -> CodecPrompt:
    assert isinstance(prompt, CodecPrompt)
    return prompt


@everywhere
def test_every_chunk_has_the_rows_of_its_own_tokens() -> None:
    """Rows lag by one; here each row shows which token it was made of."""
    seen: list[tuple[int, tuple[int, ...], list[float], bool]] = []

    @chunkable
    def spy(context: TransformContext) -> Prompt:
        (source,) = context.sources
        rows = source.tensors["hidden_states"][:, 0].tolist()
        seen.append((context.first_row, source.token_ids, rows, context.is_last))
        return thinker_to_talker(context)

    stages = speech_stages((2, None), talker={"transform": spy}, thinker={"hide_rows": 3})
    run(stages, {"x": "abcdef"})
    tokens = [token for _, new, _, _ in seen for token in new]
    sequence = [*b"abcdef", *tokens]
    row = token = 0
    for first_row, new, rows, is_last in seen:
        token += len(new)
        assert first_row == row
        assert rows == sequence[row : 6 + token - 1]
        row += len(rows)
        assert is_last is (token == len(tokens))
    assert [len(new) for _, new, _, _ in seen] == [2, 2, 3]


@everywhere
def test_first_sound_comes_while_the_thinker_still_thinks() -> None:
    outputs = drain(start(speech_stages((1, 1)), {"x": "a rather long prompt"}))["x"]
    first = next(output for output in outputs if "code2wav" in output.stages)
    assert not first.stages["thinker"].finished


@over_every_transport
def test_sound_and_text_are_sent_once_and_add_up() -> None:
    outputs = drain(start(speech_stages((2, 3), thinker={"steps_per_token": 3})))
    for of_request in outputs.values():
        text = "".join(output.stages["thinker"].delta for output in of_request)
        heard = [
            delta.samples
            for output in of_request
            if "code2wav" in output.stages
            and (delta := output.stages["code2wav"].audio_delta) is not None
        ]
        assert len(heard) > 1
        assert (text, torch.cat(heard).tolist()) == text_and_sound(of_request[-1])
        assert all(
            output.stages["code2wav"].audio is None
            for output in of_request[:-1]
            if "code2wav" in output.stages and not output.stages["code2wav"].finished
        )
        assert list(of_request[-1].stages) == ["thinker", "code2wav"]


class Told(StageWorker):
    """Records which tensors finished outputs have."""

    seen: ClassVar[dict[str, list[str]]] = {}

    def events(self) -> Sequence[Event | Traced]:
        news = super().events()
        for event in news:
            if isinstance(event, Output) and event.delta is not None and event.delta.finished:
                self.seen[self.stage.name] = sorted(event.delta.tensors)
        return news


@everywhere
@pytest.mark.parametrize(
    ("chunk", "final_output", "is_heard", "expected"),
    [
        (2, ("text",), False, []),
        (2, ("text", "tensors"), False, list(sorted(Thinker.makes))),
        (None, ("text",), False, list(sorted(Thinker.makes))),
        (2, ("text",), True, list(sorted(Thinker.makes))),
    ],
)
def test_whole_tensors_are_sent_only_where_they_are_needed(
    chunk: int | None,
    final_output: tuple[str, ...],
    is_heard: bool,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = text_and_sound(whole()["x"])
    for drives_stages in (orchestrator_module, worker):
        monkeypatch.setattr(drives_stages, "StageWorker", Told)
    stages = speech_stages((chunk, 3), thinker={"final_output": final_output})
    heard: list[StageOutput] = []
    last = drain(start(stages, {"x": PROMPTS["x"]}, heard.append if is_heard else None))["x"][-1]
    assert text_and_sound(last) == said
    assert Told.seen["thinker"] == expected
    assert sorted(last.stages["thinker"].tensors) == (expected if len(final_output) > 1 else [])


@everywhere
def test_sound_is_only_for_those_who_want_it() -> None:
    stages = speech_stages((2, 3), code2wav={"final_output": ("text",)})
    last = run(stages)["x"].stages["code2wav"]
    assert (last.audio, last.audio_delta) == (None, None)


@everywhere
def test_a_slow_stage_holds_up_the_one_before_at_the_bound() -> None:
    """It is held until its source rests: no chunk is in transit in any of its steps."""
    waiting = WaitingChunks(talker_to_code2wav)
    vocoding = {"max_pending": 3, "transform": waiting.transform}
    _, talker, vocoder = stages = speech_stages((1, 2), code2wav=vocoding)
    waiting.stage = vocoder
    at_steps: list[int] = []

    def is_held() -> bool:
        for request_id in vocoder.live:
            source = talker.live.get(request_id)
            if source is None:
                continue  # it is done
            if not source.paused or waiting.now(request_id) < 3:
                return True
            at_steps.append(waiting.now(request_id))
        return False

    vocoder.is_held = is_held
    last = drain(start(stages))
    assert set(at_steps) == {3}, "each one that is taken is followed by another one"
    assert waiting.most == dict.fromkeys(PROMPTS, 3)
    assert {id_: text_and_sound(outputs[-1]) for id_, outputs in last.items()} == {
        id_: text_and_sound(output) for id_, output in whole().items()
    }


def test_a_drained_queue_resumes_the_source_at_once() -> None:
    """Only a single thread can tell the turn: stages elsewhere have no common turns."""
    stages = speech_stages((1, 1), code2wav={"steps_per_token": 5, "max_pending": 2})
    orchestrator = start(stages, {"x": PROMPTS["x"]})
    talker, vocoder = stages[1:]
    until(orchestrator, lambda: "x" in talker.live and talker.live["x"].paused)
    taken, made = len(vocoder.received["x"]), len(talker.live["x"].tokens)
    until(orchestrator, lambda: len(vocoder.received["x"]) > taken)
    orchestrator.step()  # the vocoder's sound ended the previous one
    assert len(talker.live["x"].tokens) == made + 1, "in the very turn"


@everywhere
def test_a_pause_is_lifted_to_avoid_a_deadlock() -> None:
    """x is in the talker and waits for the thinker, where y is, which is paused."""
    prompts = {"x": PROMPTS["x"], "y": PROMPTS["z"]}
    waiting = WaitingChunks(thinker_to_talker)
    talking = {"seats": 1, "max_pending": 1, "transform": waiting.transform}
    # After six of its twelve tokens x makes room for y, as if it had been preempted.
    stages = speech_stages((2, 3), thinker={"seats": 1, "rotate": 6}, talker=talking)
    thinker, talker = stages[:2]
    waiting.stage = talker
    thinker.is_held = lambda: "y" not in thinker.live
    orchestrator = start(stages, {"x": prompts["x"]})
    until(orchestrator, lambda: "x" in thinker.live)
    orchestrator.add_request(OmniRequest(prompts["y"], "y"))
    last = {id_: outputs[-1] for id_, outputs in drain(orchestrator).items()}
    assert waiting.most == {"x": 1, "y": 2}, "y went on for one chunk, which nobody had room for"
    assert {id_: text_and_sound(output) for id_, output in last.items()} == {
        id_: text_and_sound(output) for id_, output in whole(prompts).items()
    }


@everywhere
def test_a_pause_is_kept_while_any_stage_has_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns without an output are no deadlock: here the vocoder takes many per token."""
    monkeypatch.setattr(orchestrator_module, "_WAIT_TIMEOUT_S", 0.01)
    waiting = WaitingChunks(talker_to_code2wav)
    vocoding = {"max_pending": 1, "transform": waiting.transform}
    stages = speech_stages((1, 1), code2wav=vocoding)
    talker, vocoder = stages[1:]
    waiting.stage = vocoder
    is_slow = True
    vocoder.is_held = lambda: is_slow
    orchestrator = start(stages, {"x": PROMPTS["x"]})
    until(orchestrator, lambda: waiting.now("x") == 1 and talker.live["x"].paused)
    made = len(talker.live["x"].tokens)
    for _ in range(20):
        orchestrator.step()
        assert talker.live["x"].paused and len(talker.live["x"].tokens) == made
    is_slow = False
    assert text_and_sound(drain(orchestrator)["x"][-1]) == text_and_sound(whole()["x"])
    assert waiting.most["x"] == 1


@everywhere
def test_a_stage_may_feed_several_streamed_or_not() -> None:
    def stages(*chunks: int | None) -> list[FakeSpeechStage]:
        return [
            Thinker("thinker"),
            *(
                Talker(
                    f"talker{index}",
                    "thinker",
                    "thinker_to_talker",
                    chunk_size=chunk,
                    steps_per_token=1 + index,
                    max_pending=1,
                    tail=3,
                )
                for index, chunk in enumerate(chunks)
            ),
        ]

    streamed, expected = run(stages(1, None, 3)), run(stages(None, None, None))
    for request_id in PROMPTS:
        assert {name: out.text for name, out in streamed[request_id].stages.items()} == {
            name: out.text for name, out in expected[request_id].stages.items()
        }


@everywhere
def test_the_observer_sees_every_stage_once_and_whole() -> None:
    seen: list[StageOutput] = []
    orchestrator = start(speech_stages((1, 1)), on_stage_output=seen.append)
    drain(orchestrator)
    assert sorted((output.request_id, output.stage) for output in seen) == sorted(
        (request_id, stage) for request_id in PROMPTS for stage in ("thinker", "talker", "code2wav")
    )
    for output in seen:
        if output.stage == "thinker":
            rows = output.num_prompt_tokens + len(output.token_ids) - 1
            assert {len(tensor) for tensor in output.tensors.values()} == {rows}


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
