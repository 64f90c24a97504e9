"""What a session does where its client is slow, or has gone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.websockets import WebSocketDisconnect

from omni.server.openai.realtime import RealtimeSession, merged_options
from omni.server.openai.realtime_events import ResponseOptions
from omni.server.serving.client import Client
from tests.support.live_server import LiveServer
from tests.support.patience import PATIENCE_S


def test_what_is_said_of_a_response_lies_over_what_its_session_is_like():
    options = {"audio": {"output": {"voice": "Ethan"}}}
    bias = {"logit_bias": {"5": 1.0}}
    before = ResponseOptions.model_validate({**options, "stages": {"thinker": bias, "talker": {}}})
    change: dict[str, Any] = {"audio": {"output": {"format": {"type": "audio/pcm", "rate": 8000}}}}
    change["stages"] = {"thinker": {"logit_bias": {"6": 1.0}, "seed": 1}}
    merged = merged_options(before, ResponseOptions.model_validate(change))
    assert merged.audio is not None and merged.audio.output is not None
    assert merged.audio.output.voice == "Ethan" and merged.audio.output.format is not None
    assert merged.stages == {
        "thinker": {"logit_bias": {"6": 1.0}, "seed": 1},
        "talker": {},
    }


class SlowSocket:
    """A connection whose client takes one kind of event only when it is let to."""

    def __init__(self, slow: str) -> None:
        self.slow = slow
        self.is_at_it = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.heard: list[Any] = []
        self.says: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def send_text(self, text: str) -> None:
        event = json.loads(text)
        if event["type"] == self.slow:
            self.is_at_it.set()
            await self.goes_on.wait()
        self.heard.append(event)

    async def receive(self) -> dict[str, Any]:
        return await self.says.get()

    def say(self, **event: Any) -> None:
        self.says.put_nowait({"type": "websocket.receive", "text": json.dumps(event)})

    def heard_of(self, kind: str) -> list[Any]:
        return [each for each in self.heard if each["type"] == kind]


@pytest.mark.parametrize("slow", ["response.output_text.done", "error"])
def test_an_answer_that_has_ended_cannot_be_cancelled_while_its_end_is_told(
    server: LiveServer, slow: str
):
    # More than the model reads at once: the request is refused in the pipeline.
    text = "hello " * 20_000 if slow == "error" else "hello"
    part = {"type": "input_text", "text": text}
    item = {"type": "message", "role": "user", "content": [part]}
    options = {"stages": {"writer": {"max_tokens": 3}}}

    async def talk() -> SlowSocket:
        slow_one: Any = SlowSocket(slow)
        pipeline = server.pipelines.find("chat")
        session = RealtimeSession(slow_one, server.pipelines, pipeline, Client("id", None))
        task = asyncio.create_task(session.run())
        slow_one.say(type="conversation.item.create", item=item)
        slow_one.say(type="response.create", response=options)
        await slow_one.is_at_it.wait()
        slow_one.slow = ""
        slow_one.say(type="response.cancel")
        while not slow_one.heard_of("error"):
            await asyncio.sleep(0)
        slow_one.goes_on.set()
        while not slow_one.heard_of("response.done"):
            await asyncio.sleep(0)
        slow_one.says.put_nowait({"type": "websocket.disconnect"})
        await task
        said = [each["role"] for each in session._conversation.history(None)[0]]
        assert said == (["user"] if slow == "error" else ["user", "assistant"])
        return slow_one

    heard = asyncio.run(asyncio.wait_for(talk(), PATIENCE_S))
    assert heard.heard_of("error")[0]["error"]["code"] == "no_active_response"
    (done,) = heard.heard_of("response.done")
    assert done["response"]["status"] == ("failed" if slow == "error" else "completed")


class GoneSocket:
    """A connection that breaks when the first thing is sent, and tells so in the end."""

    num_sent = 0

    async def send_text(self, _: str) -> None:
        self.num_sent += 1
        raise WebSocketDisconnect(1006)

    async def receive(self) -> dict[str, Any]:
        return {"type": "websocket.disconnect"}


def test_whoever_has_gone_is_sent_nothing_and_ends_quietly(server: LiveServer):
    gone: Any = GoneSocket()
    pipeline = server.pipelines.find("chat")
    session = RealtimeSession(gone, server.pipelines, pipeline, Client("id", None))
    asyncio.run(session.run())
    assert gone.num_sent == 1
