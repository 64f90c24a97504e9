"""Pipecat's services of OpenAI: language model, speech in both directions, live transcription."""

from __future__ import annotations

import asyncio
import io
import wave
from typing import Any

import openai
import pytest
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    LLMContextFrame,
    LLMTextFrame,
    ProposedUserStartedSpeakingFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSTextFrame,
)
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.services.openai.stt import OpenAIRealtimeSTTService, OpenAISTTService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.tests.utils import SleepFrame, run_test

pytestmark = pytest.mark.client("pipecat-ai")
RATE = 24_000


def sent(service: Any, *frames: Frame, wait_s: float = 3.0) -> list[Any]:
    """What comes out of a service in a pipeline of its own."""
    frames_to_send = [*frames, SleepFrame(wait_s)]
    down, _ = asyncio.run(run_test(service, frames_to_send=frames_to_send))
    return list(down)


def in_pieces(speech: bytes) -> list[bytes]:
    """A tenth of a second each."""
    return [speech[at : at + RATE // 5] for at in range(0, len(speech), RATE // 5)]


def test_a_language_model_writes_what_the_client_gets_too(url: str) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    service = OpenAILLMService(base_url=url, settings=OpenAILLMService.Settings(model="chat"))
    frames = sent(service, LLMContextFrame(LLMContext(messages)))
    text = "".join(each.text for each in frames if isinstance(each, LLMTextFrame))
    whole = openai.OpenAI().chat.completions.create(model="chat", messages=messages)
    assert text == whole.choices[0].message.content


def test_speech_is_made_of_text(url: str) -> None:
    settings = OpenAITTSService.Settings(model="spoken_sums", voice="alloy")
    service = OpenAITTSService(base_url=url, sample_rate=RATE, settings=settings)
    frames = sent(service, TTSSpeakFrame("8 * 4"), wait_s=6.0)
    sounds = [each for each in frames if isinstance(each, TTSAudioRawFrame)]
    assert sounds and {each.sample_rate for each in sounds} == {RATE}
    assert sum(len(each.audio) for each in sounds) > 2 * RATE * 0.3


def test_speech_is_written_down(url: str, speech: bytes) -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes(speech)
    settings = OpenAISTTService.Settings(model="ears")
    service = OpenAISTTService(base_url=url, settings=settings)

    async def written() -> list[Any]:
        return [frame async for frame in service.run_stt(file.getvalue())]

    (frame,) = asyncio.run(written())
    assert isinstance(frame, TranscriptionFrame) and frame.text


def test_speech_is_written_down_live(url: str, speech: bytes) -> None:
    service = OpenAIRealtimeSTTService(
        api_key="none",
        base_url=url.replace("http", "ws") + "/realtime",
        settings=OpenAIRealtimeSTTService.Settings(model="ears"),
        turn_detection={"type": "server_vad"},
    )
    frames = [InputAudioRawFrame(each, RATE, 1) for each in in_pieces(speech)]
    heard = sent(service, SleepFrame(1.0), *frames, wait_s=6.0)
    assert [each.text for each in heard if isinstance(each, TranscriptionFrame)]


def test_a_session_reads_and_hears_and_answers_by_voice(url: str, speech: bytes) -> None:
    service = OpenAIRealtimeLLMService(
        api_key="none",
        base_url=url.replace("http", "ws") + "/realtime",
        settings=OpenAIRealtimeLLMService.Settings(model="spoken_sums"),
    )
    context = LLMContext([{"role": "user", "content": "twelve plus thirty"}])
    frames = [InputAudioRawFrame(each, RATE, 1) for each in in_pieces(speech)]
    heard = sent(service, LLMContextFrame(context), SleepFrame(6.0), *frames, wait_s=8.0)
    text = "".join(each.text for each in heard if isinstance(each, TTSTextFrame))
    assert text.startswith("12 + 30 = forty two") and text != "12 + 30 = forty two"
    assert any(isinstance(each, TTSAudioRawFrame) for each in heard)


def test_speech_over_an_answer_is_answered(url: str, speech: bytes) -> None:
    service = OpenAIRealtimeLLMService(
        api_key="none",
        base_url=url.replace("http", "ws") + "/realtime",
        settings=OpenAIRealtimeLLMService.Settings(model="spoken_sums"),
    )
    context = LLMContext([{"role": "user", "content": "seventeen times five"}])
    over = [InputAudioRawFrame(each, RATE, 1) for each in in_pieces(speech)]
    heard = sent(service, LLMContextFrame(context), SleepFrame(2.0), *over, wait_s=8.0)
    kinds = [type(each) for each in heard]
    assert ProposedUserStartedSpeakingFrame in kinds and ErrorFrame not in kinds
    after = heard[kinds.index(ProposedUserStartedSpeakingFrame) :]
    assert [each.text for each in after if isinstance(each, TTSTextFrame)], "what was said over it"
