"""Thinker, talker and vocoder in a row produce transformers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from engine import ChatPrompt, FinishReason, VideoFeatures
from omni import Omni, OmniOutput, OmniRequest
from tests.support.omni_reference import OmniAnswer, OmniReference
from tests.support.omni_stages import SUPPRESSED, Conversation, Turn, build_pipeline
from tests.support.thinker_reference import tone

MIXED = (
    Conversation((Turn(),)),
    Conversation((Turn(1, picture=0),), system=1),
    Conversation((Turn(0, sound=0),), speaker=1),
    Conversation((Turn(2, picture=1, sound=1),)),
    Conversation((Turn(0, sound=3, item_first=False),), system=1, speaker=0),
    Conversation((Turn(0, picture=0), Turn(1, sound=0), Turn(2, picture=3))),
)
VIDEO_MESSAGES = [
    {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What is this?"}]}
]


@pytest.fixture(scope="module")
def folder(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_omni")


@pytest.fixture(scope="module")
def reference(folder: str) -> OmniReference:
    return OmniReference(folder, suppressed=SUPPRESSED)


@pytest.fixture(scope="module")
def answers(reference: OmniReference) -> list[OmniAnswer]:
    return [
        reference.answer(
            each.messages, each.images, each.audio, speaker=each.speaker_name or "Chelsie"
        )
        for each in MIXED
    ]


@pytest.fixture(params=["one step", "small chunks", "streaming"])
def omni(folder: str, request: pytest.FixtureRequest) -> Iterator[Omni]:
    settings = {
        "one step": {},
        "small chunks": {"block_size": 4, "max_num_batched_tokens": 16},
        "streaming": {"streaming": True, "block_size": 8},
    }[request.param]
    with Omni(build_pipeline(folder, **settings)) as omni:
        yield omni


def codes_of(output: OmniOutput) -> tuple[int, ...]:
    talker = output.stages["talker"]
    ids = talker.token_ids
    return ids[:-1] if talker.finish_reason is FinishReason.STOP else ids


def assert_tokens(output: OmniOutput, answer: OmniAnswer) -> None:
    assert output.error is None
    assert output.stages["thinker"].token_ids == answer.text_ids
    assert codes_of(output) == answer.codes


def samples_of(output: OmniOutput) -> torch.Tensor:
    audio = output.stages["code2wav"].audio
    assert audio is not None
    assert audio.sampling_rate == 24_000
    return audio.samples


def test_a_batch_of_mixed_requests_equals_transformers(
    omni: Omni, answers: list[OmniAnswer]
) -> None:
    streams = any(
        stage.inputs is not None and stage.inputs.chunk_size
        for stage in omni.pipeline.stages.values()
    )
    for _ in range(2):  # the second time from the caches
        outputs = omni.generate([each.request(f"r{i}") for i, each in enumerate(MIXED)])
        for output, answer in zip(outputs, answers, strict=True):
            assert_tokens(output, answer)
            talker, vocoder = (output.stages[name] for name in ("talker", "code2wav"))
            assert vocoder.finish_reason is talker.finish_reason
            samples = samples_of(output)
            assert samples.shape == answer.samples.shape
            # In windows the flow sees less of the utterance: the same length, another waveform.
            if not streams:
                torch.testing.assert_close(samples, answer.samples, atol=1e-6, rtol=0)
    assert omni.stats()["thinker"].cached_tokens > 0
    assert omni.stats()["talker"].cached_tokens > 0


def test_the_answers_tell_the_requests_apart(answers: list[OmniAnswer]):
    assert len({answer.text_ids for answer in answers}) == len(answers)
    assert len({answer.codes for answer in answers}) == len(answers)


def test_a_voice_changes_the_speech_and_not_the_text(folder: str, reference: OmniReference):
    asked = [Conversation((Turn(0),), speaker=speaker) for speaker in (0, 1)]
    with Omni(build_pipeline(folder)) as omni:
        first, second = omni.generate([each.request(f"r{i}") for i, each in enumerate(asked)])
    assert first.stages["thinker"].token_ids == second.stages["thinker"].token_ids
    assert codes_of(first) != codes_of(second)
    for output, each in zip((first, second), asked, strict=True):
        answer = reference.answer(
            each.messages, audio=each.audio, speaker=each.speaker_name or "Chelsie"
        )
        assert_tokens(output, answer)
        torch.testing.assert_close(samples_of(output), answer.samples, atol=1e-6, rtol=0)


def test_a_padded_batch_of_transformers_as_it_is_agrees(folder: str):
    """Its talker adds the codec's pad and bos where there is a mask, as in its training.

    ``OmniReference`` restores the mask that ``generate`` drops when nothing is padded; here
    something is, and nothing is patched.
    """
    asked = [
        Conversation((Turn(0),)),
        Conversation((Turn(1), Turn(2))),
        Conversation((Turn(2),), 1),
    ]
    reference = OmniReference(folder, suppressed=SUPPRESSED, restores_mask=False)
    answers = reference.answer_padded([each.messages for each in asked])
    with Omni(build_pipeline(folder)) as omni:
        outputs = omni.generate([each.request(f"r{i}") for i, each in enumerate(asked)])
    for output, answer in zip(outputs, answers, strict=True):
        assert_tokens(output, answer)
        torch.testing.assert_close(samples_of(output), answer.samples, atol=1e-6, rtol=0)


def test_the_repetition_penalty_counts_what_transformers_counts(
    folder: str, reference: OmniReference
):
    asked = Conversation((Turn(0),))
    answer = reference.answer(asked.messages, repetition_penalty=1.3)
    with Omni(build_pipeline(folder, repetition_penalty=1.3)) as omni:
        (output,) = omni.generate(asked.request("r"))
    assert_tokens(output, answer)


@pytest.fixture(scope="module")
def sees_videos(folder: str) -> Iterator[Omni]:
    with Omni(build_pipeline(folder, block_size=8)) as omni:
        yield omni


@pytest.mark.parametrize(
    ("second_per_grid", "seconds"),
    [(1.0, None), (0.5, None), (0.34, None), (1.0, 2.3), (2.0, 0.5), (0.9, 0.3), (0.34, 0.9)],
)
def test_a_video_with_and_without_its_sound_equals_transformers(
    sees_videos: Omni, reference: OmniReference, second_per_grid: float, seconds: float | None
):
    sound = None if seconds is None else tone(seconds)
    generator = torch.Generator().manual_seed(3)
    grid = torch.tensor([3, 4, 6])
    pixels = torch.randn(int(grid.prod()), 3 * 2 * 14 * 14, generator=generator)
    video = VideoFeatures(pixels, grid, second_per_grid, sound)
    answer = reference.answer(VIDEO_MESSAGES, video=video, speaker="Ethan")
    prompt = ChatPrompt(tuple(VIDEO_MESSAGES), multi_modal_data={"video": [video]})
    with sees_videos.paused() as pipeline:
        for stage in pipeline.stages.values():
            stage.reset_prefix_cache()
    for _ in range(2):
        (output,) = sees_videos.generate(OmniRequest(prompt, speaker="Ethan"))
        assert_tokens(output, answer)
        torch.testing.assert_close(samples_of(output), answer.samples, atol=1e-6, rtol=0)
