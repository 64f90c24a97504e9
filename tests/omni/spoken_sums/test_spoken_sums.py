"""The shipped trained pipeline: right answers, by text and by voice, whatever the caches hold.

A consistent wrong answer passes everywhere else; here it does not. Training never had these
questions; those of ``questions/`` are spoken by voices and at rates it never had either. That
caching changes nothing, near ties included, is tested with the demo and its suggestions:
``tests/omni/commands/test_demo.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stage_configs
from engine import AudioPrompt, ChatPrompt
from engine import ExplicitEncoderDecoderPrompt as Explicit
from omni import Omni, OmniRequest
from omni.pipelines.pipeline_config import PipelineConfig
from omni.requests.request import OmniOutput

SHIPPED = Path(stage_configs.__file__).parent / "spoken_sums"
HERE = Path(__file__).parent / "questions"

TYPED = {
    "what is eight times four": "8 * 4 = thirty two",
    "forty four times four": "44 * 4 = one hundred seventy six",
    "eighty two plus thirty three": "82 + 33 = one hundred fifteen",
    "how much is fifty plus sixty one": "50 + 61 = one hundred eleven",
    "What is Five plus eighty eight?": "5 + 88 = ninety three",
    "ninety one minus forty one": "91 - 41 = fifty",
    "sixty two minus twenty two": "62 - 22 = forty",
    "32 - 25": "32 - 25 = seven",
    "16 + 54": "16 + 54 = seventy",
    "15 * 10": "15 * 10 = one hundred fifty",
    "twenty-one plus thirty-four": "21 + 34 = fifty five",
    "three minus five": "3 - 5 = that is not a sum i know",
    "seven times eighty": "7 * 80 = that is not a sum i know",
    "200+1": "that is not a sum i know",
    "what is 300 minus 1?": "that is not a sum i know",
    "one plus two plus three": "that is not a sum i know",
    "8 / 4": "that is not a sum i know",
    "eight divided by four": "that is not a sum i know",
    "where is the station": "that is not a sum i know",
    "do you like music": "that is not a sum i know",
}
WITHOUT_SOUND = {"stages.talker.sampling.max_tokens": 1}
"""The thinker's answers alone: speaking takes longer than writing."""


def typed(text: str) -> OmniRequest:
    return OmniRequest(ChatPrompt(({"role": "user", "content": text},)))


def spoken(path: Path) -> OmniRequest:
    message = {"role": "user", "content": [{"type": "audio"}]}
    return OmniRequest(ChatPrompt((message,), {"audio": [path]}))


def reply(output: OmniOutput) -> str | None:
    assert output.error is None
    return output.stages["thinker"].text


def recordings() -> dict[Path, str]:
    """Return sound files, and the replies to them from the adjacent ``replies.txt``."""
    lines = (HERE / "replies.txt").read_text("utf-8").splitlines()
    pairs = (line.split(": ", 1) for line in lines)
    return {HERE / f"{name}.flac": answer for name, answer in pairs}


@pytest.fixture(scope="module")
def thinker() -> Iterator[Omni]:
    with Omni("spoken_sums", overrides=WITHOUT_SOUND) as omni:
        yield omni


def test_typed_questions_that_training_never_had_are_answered(thinker: Omni) -> None:
    outputs = thinker.generate([typed(text) for text in TYPED])
    assert dict(zip(TYPED, map(reply, outputs), strict=True)) == TYPED


def test_spoken_questions_in_voices_that_training_never_had_are_answered(thinker: Omni) -> None:
    asked = recordings()
    assert len(asked) >= 10
    outputs = thinker.generate([spoken(path) for path in asked])
    assert dict(zip(asked, map(reply, outputs), strict=True)) == asked


@pytest.mark.parametrize("form", [AudioPrompt, lambda file: Explicit(AudioPrompt(file))])
def test_a_sound_alone_is_a_message_with_it(thinker: Omni, form: Callable[[Path], Any]) -> None:
    asked = dict([*recordings().items()][:2])
    outputs = thinker.generate([OmniRequest(form(path)) for path in asked])
    assert dict(zip(asked, map(reply, outputs), strict=True)) == asked


def test_the_second_turn_goes_on_from_the_first_and_hits_it(thinker: Omni) -> None:
    sound = SHIPPED / "questions" / "twelve_plus_thirty.flac"
    follow_up = SHIPPED / "questions" / "and_times_two.flac"
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "audio"}]},
        {"role": "assistant", "content": "12 + 30 = forty two"},
        {"role": "user", "content": [{"type": "audio"}]},
    ]
    (first,) = thinker.generate(spoken(sound))
    assert reply(first) == messages[1]["content"]
    prompt = ChatPrompt(tuple(messages), {"audio": [sound, follow_up]})
    (second,) = thinker.generate(OmniRequest(prompt))
    assert reply(second) == "42 * 2 = eighty four"
    read = second.stages["thinker"]
    block_size = 8
    assert read.num_cached_tokens >= first.stages["thinker"].num_prompt_tokens - block_size


@pytest.mark.parametrize("text", ["and times two?", "times 2"])
def test_a_typed_question_goes_on_from_one_by_voice(thinker: Omni, text: str) -> None:
    messages = (
        {"role": "user", "content": [{"type": "audio"}]},
        {"role": "assistant", "content": "12 + 30 = forty two"},
        {"role": "user", "content": text},
    )
    sound = SHIPPED / "questions" / "twelve_plus_thirty.flac"
    (output,) = thinker.generate(OmniRequest(ChatPrompt(messages, {"audio": [sound]})))
    assert reply(output) == "42 * 2 = eighty four"


def test_a_conversation_changes_between_voice_and_keyboard(thinker: Omni) -> None:
    """Four turns, each with the reply that the previous one really got."""
    follow_up = SHIPPED / "questions" / "and_times_two.flac"
    asked: tuple[str | Path, ...] = ("ninety minus eighty", follow_up, "and plus five?", follow_up)
    messages: list[dict[str, Any]] = []
    sounds: list[Path] = []
    replies = []
    for turn in asked:
        is_typed = isinstance(turn, str)
        messages.append({"role": "user", "content": turn if is_typed else [{"type": "audio"}]})
        sounds += [] if isinstance(turn, str) else [turn]
        data = {"audio": list(sounds)} if sounds else {}
        (output,) = thinker.generate(OmniRequest(ChatPrompt(tuple(messages), data)))
        replies.append(reply(output))
        messages.append({"role": "assistant", "content": replies[-1]})
    assert replies == ["90 - 80 = ten", "10 * 2 = twenty", "20 + 5 = twenty five", "25 * 2 = fifty"]


@pytest.fixture(scope="module")
def streamed_and_not() -> Iterator[tuple[Omni, Omni]]:
    """A vocoder of few steps, whose sound is not compared, and the talker's tokens as output."""
    shown = {
        "stages.code2wav.generation.num_steps": 2,
        "stages.talker.final_output": "text",
    }
    unstreamed = {**shown, "stages.talker.inputs.chunk_size": None}
    with (
        Omni("spoken_sums", overrides=shown) as one,
        Omni("spoken_sums", overrides=unstreamed) as other,
    ):
        yield one, other


def test_streaming_changes_no_token_of_what_is_written_and_said(
    streamed_and_not: tuple[Omni, Omni],
) -> None:
    asked = [
        OmniRequest(typed(text).prompt, speaker=speaker)
        for text, speaker in (("six times seven", "Ada"), ("hello", "Ben"))
    ]
    reported = []
    for omni in streamed_and_not:
        outputs = omni.generate(asked)
        assert [output.error for output in outputs] == [None, None]
        reported.append(
            [
                [output.stages[name].token_ids for name in ("thinker", "talker")]
                for output in outputs
            ]
        )
    assert reported[0] == reported[1]
    assert reported[0][0][1] != reported[0][1][1]


def test_the_examples_of_its_page_are_answered(thinker: Omni) -> None:
    examples = PipelineConfig.load("spoken_sums").examples
    answers = [reply(output) for output in thinker.generate([typed(text) for text in examples])]
    assert answers == ["12 + 30 = forty two", "7 * 8 = fifty six"]


def test_what_ships_is_small_finite_and_described() -> None:
    from safetensors import safe_open

    size = sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file())
    assert size <= 24 * 2**20
    with safe_open(SHIPPED / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            assert tensor.dtype in (torch.bfloat16, torch.float16), name
            assert bool(tensor.isfinite().all()), name
    card = (SHIPPED / "README.md").read_text("utf-8")
    assert "## Licence" in card and "## What it cannot" in card
