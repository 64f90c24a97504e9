"""The three stages of a tiny Qwen2.5-Omni or Qwen3-Omni, and conversations for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoTokenizer

from engine import ChatPrompt, EngineConfig, SamplingParams
from engine.interface.config import GenerationParams, GeneratorConfig
from omni import OmniOutput, OmniRequest, Pipeline
from omni.seeded.omni import OMNI_SPEAKERS
from stages import AutoregressiveStage, GeneratorStage, StageInputs, StageOutput
from tests.support.greedy_reference import NEAR_TIE
from tests.support.pictures import picture
from tests.support.whole_orchestrator import WholeOrchestrator

SUPPRESSED: tuple[int, ...] = (0, 3, 4, 5, 6, 7, 8, 9)
"""Placeholders and similar ids, which random weights generate and transformers rejects."""

_ATOL = 1e-6

_SYSTEM = (
    "You are a helpful assistant.",
    "The library has three floors: history and maps below, music in the middle.",
)
_QUESTIONS = ("What is this?", "Please explain in a few words.", "And what came then?")
_ANSWERS = ("A clock keeps its own time.", "The first storm arrived.")


@cache
def sound(number: int) -> NDArray[np.float32]:
    """Return a tone with noise; all but the last have the same length."""
    times = np.arange(16_000 * (3 if number < 3 else 2) // 10) / 16_000
    noise = np.random.default_rng(number).standard_normal(len(times))
    tone = np.sin(2 * np.pi * (200 + 90 * number) * times)
    return (0.3 * tone + 0.02 * noise).astype(np.float32)


@dataclass(frozen=True)
class Turn:
    """A user's turn: a question, and optionally a picture and a sound."""

    question: int = 0
    picture: int | None = None
    sound: int | None = None
    item_first: bool = True

    def parts(self) -> list[dict[str, Any]]:
        shown = [{"type": "image"}] if self.picture is not None else []
        shown += [{"type": "audio"}] if self.sound is not None else []
        text = [{"type": "text", "text": _QUESTIONS[self.question]}]
        return shown + text if self.item_first else text + shown


@dataclass(frozen=True)
class Conversation:
    """Turns, with fixed answers of the assistant between them."""

    turns: tuple[Turn, ...]
    system: int = 0
    speaker: int | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = [{"role": "system", "content": _SYSTEM[self.system]}]
        for number, turn in enumerate(self.turns):
            if number:
                said.append({"role": "assistant", "content": _ANSWERS[number % len(_ANSWERS)]})
            said.append({"role": "user", "content": turn.parts()})
        return said

    @property
    def images(self) -> list[Any]:
        return [picture(turn.picture) for turn in self.turns if turn.picture is not None]

    @property
    def audio(self) -> list[NDArray[np.float32]]:
        return [sound(turn.sound) for turn in self.turns if turn.sound is not None]

    @property
    def speaker_name(self) -> str | None:
        return None if self.speaker is None else OMNI_SPEAKERS[self.speaker]

    def request(self, request_id: str, **options: Any) -> OmniRequest:
        data = {"image": self.images, "audio": self.audio}
        return OmniRequest(
            ChatPrompt(
                tuple(self.messages),
                multi_modal_data={name: items for name, items in data.items() if items},
            ),
            request_id=request_id,
            speaker=self.speaker_name,
            **options,
        )


def conversations(max_turns: int = 3) -> st.SearchStrategy[Conversation]:
    """Draw from few of each kind, so that prefixes, pictures and sounds repeat."""
    turns = st.builds(
        Turn,
        question=st.integers(0, 1),
        picture=st.none() | st.integers(0, 2),
        sound=st.none() | st.integers(0, 1),
        item_first=st.booleans(),
    )
    return st.builds(
        Conversation,
        turns=st.lists(turns, min_size=1, max_size=max_turns).map(tuple),
        system=st.integers(0, 1),
        speaker=st.none() | st.integers(0, 1),
    )


def build_pipeline(
    folder: str,
    *,
    caching: bool = True,
    streaming: bool = False,
    num_text: int = 12,
    num_codes: int = 24,
    num_steps: int = 2,
    num_blocks: int | None = None,
    repetition_penalty: float = 1.0,
    text_chunk: int = 3,
    code_chunk: int = 5,
    talker_stop: tuple[str, ...] = (),
    is_qwen3: bool = False,
    **engine: Any,
) -> Pipeline:
    """Build thinker, talker and code2wav on one checkpoint, greedy, with the top 2 logprobs."""
    suppressed, prefix = SUPPRESSED, ""
    outputs: tuple[str, ...] = ("hidden_states", "token_embeds", "position_ids")
    if is_qwen3:
        suppressed, prefix = _special_ids(folder), "qwen3_"
        outputs = ("speech_rows", "position_ids", "token_ids")

    def config(part: str) -> EngineConfig:
        settings = {"max_model_len": 512, "num_blocks": num_blocks or 256, "max_num_seqs": 8}
        return EngineConfig(
            model=folder,
            part=part,
            device="cpu",
            enable_prefix_caching=caching,
            **(settings | engine),
        )

    thinker = AutoregressiveStage(
        "thinker",
        config("thinker"),
        sampling=SamplingParams(
            temperature=0.0, max_tokens=num_text, suppress_token_ids=suppressed, logprobs=2
        ),
        outputs=outputs,
        final_output=("text",),
    )
    talker = AutoregressiveStage(
        "talker",
        config("talker"),
        sampling=SamplingParams(
            temperature=0.0,
            max_tokens=num_codes,
            repetition_penalty=repetition_penalty,
            stop=talker_stop,
            logprobs=2,
        ),
        outputs=("codes",) if is_qwen3 else (),
        inputs=StageInputs(
            ("thinker",), f"{prefix}thinker_to_talker", chunk_size=text_chunk if streaming else None
        ),
        final_output=("text",),
    )
    code2wav = GeneratorStage(
        "code2wav",
        GeneratorConfig(
            model=folder,
            part="code2wav",
            device="cpu",
            generation=GenerationParams() if is_qwen3 else GenerationParams(num_steps=num_steps),
        ),
        inputs=StageInputs(
            ("talker",), f"{prefix}talker_to_code2wav", chunk_size=code_chunk if streaming else None
        ),
        final_output=("audio",),
    )
    return Pipeline([thinker, talker, code2wav])


def _special_ids(folder: str) -> tuple[int, ...]:
    """Return ids banned from replies: placeholders without items, but not the end of text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tuple(each for each in tokenizer.all_special_ids if each != tokenizer.eos_token_id)


def assert_same(ours: OmniOutput, theirs: OmniOutput) -> None:
    """Check for the same text and codec ids, unless logits nearly tie, and the same sound."""
    assert ours.error is None and theirs.error is None
    for stage in ("thinker", "talker"):
        if _parted_by_a_tie(ours.stages[stage], theirs.stages[stage]):
            return
        assert ours.stages[stage].finish_reason == theirs.stages[stage].finish_reason
    said, expected = ours.stages["code2wav"].audio, theirs.stages["code2wav"].audio
    assert said is not None and expected is not None
    torch.testing.assert_close(said.samples, expected.samples, atol=_ATOL, rtol=0)


def assert_all_as_alone(
    pipeline: Pipeline,
    script: Sequence[tuple[str, Any]],
    request: Callable[[Any, str], OmniRequest],
    alone: Callable[[Any], OmniOutput],
) -> None:
    """Add, step and abort as a script says; each request must have the output that it has alone.

    Args:
        pipeline: checks its stages' integrity after every step.
        script: steps ``("add", what)``, ``("step", count)``, ``("abort", number)``, which counts
            the additions, and ``("budget", tokens)`` of a step of engines in this process.
        request: builds a request from the added item and an id.
        alone: the item's output when nothing runs next to it.
    """
    orchestrator = WholeOrchestrator(pipeline)
    live: dict[str, Any] = {}
    num_added = 0

    def step() -> None:
        for output in orchestrator.step():
            if output.finished:
                assert_same(output, alone(live.pop(output.request_id)))
        for stage in pipeline.stages.values():
            stage.check_integrity()

    for event, argument in script:
        if event == "add":
            live[f"r{num_added}"] = argument
            orchestrator.add_request(request(argument, f"r{num_added}"))
            num_added += 1
        elif event == "step":
            for _ in range(argument):
                step()
        elif event == "budget":
            for stage in pipeline.stages.values():
                if isinstance(stage, AutoregressiveStage):
                    stage.engine._scheduler._max_num_batched_tokens = argument
        elif live.pop(f"r{argument}", None) is not None:
            orchestrator.abort(f"r{argument}")
    while live:
        step()
    assert not orchestrator.has_unfinished_requests
    assert not any(stage.has_unfinished_requests for stage in pipeline.stages.values())


def only_output(orchestrator: WholeOrchestrator, request: OmniRequest) -> OmniOutput:
    """Return the last output of a request that runs alone."""
    orchestrator.add_request(request)
    while True:
        for output in orchestrator.step():
            if output.finished:
                return output


def _parted_by_a_tie(ours: StageOutput, theirs: StageOutput) -> bool:
    """Return True if tokens differ because of a near tie of the logits; fail without such a tie."""
    if ours.token_ids == theirs.token_ids:
        return False
    assert theirs.logprobs is not None
    pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=False))
    first = next(i for i, (a, b) in pairs if a != b)
    (_, best), (_, second) = theirs.logprobs[first].top[:2]
    assert best - second < NEAR_TIE
    return True
