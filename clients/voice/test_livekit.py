"""LiveKit's plugin of OpenAI: language model, speech in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import openai
import pytest
from livekit import rtc
from livekit.agents.llm import ChatContext
from livekit.agents.utils import http_context
from livekit.plugins.openai import LLM, STT, TTS
from livekit.plugins.openai.realtime import RealtimeModel

pytestmark = pytest.mark.client("livekit-plugins-openai")
RATE = 24_000


def done(work: Coroutine[Any, Any, Any]) -> Any:
    """Run what the plugin does in a job."""

    async def job() -> Any:
        async with http_context.open():
            return await work

    return asyncio.run(job())


def test_a_language_model_writes_what_the_client_gets_too(url: str) -> None:
    async def written() -> str:
        context = ChatContext.empty()
        context.add_message(role="user", content="Hello")
        stream = LLM(model="chat", base_url=url).chat(chat_ctx=context)
        return (await stream.collect()).text

    messages: Any = [{"role": "user", "content": "Hello"}]
    whole = openai.OpenAI().chat.completions.create(model="chat", messages=messages)
    assert done(written()) == (whole.choices[0].message.content or "").strip()


def test_speech_is_made_of_text_and_written_down(url: str) -> None:
    async def spoken() -> rtc.AudioFrame:
        voice = TTS(model="spoken_sums", voice="alloy", base_url=url)
        return await voice.synthesize("8 * 4").collect()

    async def heard(sound: rtc.AudioFrame) -> str:
        event = await STT(model="ears", base_url=url, language="en").recognize(sound)
        return event.alternatives[0].text

    sound = done(spoken())
    assert sound.duration > 0.3 and sound.sample_rate == 24_000
    assert done(heard(sound))


def test_a_session_hears_and_answers_by_voice(url: str, speech: bytes) -> None:
    async def answered() -> tuple[str, float]:
        session = RealtimeModel(model="spoken_sums", voice="alloy", base_url=url).session()
        begun: asyncio.Queue[Any] = asyncio.Queue()
        session.on("generation_created", begun.put_nowait)
        for at in range(0, len(speech), RATE // 5):
            piece = speech[at : at + RATE // 5]
            session.push_audio(rtc.AudioFrame(piece, RATE, 1, len(piece) // 2))
        async for message in (await begun.get()).message_stream:
            text = "".join([part async for part in message.text_stream])
            seconds = sum([frame.duration async for frame in message.audio_stream])
        await session.aclose()
        return text, seconds

    text, seconds = done(asyncio.wait_for(answered(), 120))
    assert text and seconds > 0.3
