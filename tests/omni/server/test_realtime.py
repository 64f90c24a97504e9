"""Realtime sessions: text and sound in both directions, cancellation, errors, limits."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import soxr
from PIL import Image
from starlette.websockets import WebSocketDisconnect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from omni import AudioPrompt, ChatPrompt, OmniRequest
from omni.pipelines.pipeline_config import PipelineConfig
from omni.server.openai.realtime import RealtimeSession
from omni.server.openai.realtime_events import ResponseOptions
from omni.server.openai.realtime_response import merge_options
from omni.server.serving.client import Client
from tests.support.encoder_decoder_requests import tone
from tests.support.gated_stage import GATES, GatedStage, gated_pipeline
from tests.support.live_server import LiveServer
from tests.support.media_requests import picture
from tests.support.patience import PATIENCE_S, wait_for
from tests.support.tables import rows

SHORT = {"thinker": {"max_tokens": 10}, "talker": {"max_tokens": 24}}


@pytest.fixture(scope="module")
def running(checkpoint_cache: object) -> Iterator[LiveServer]:
    small = {"stages.thinker.engine.media_limits.max_image_pixels": 2000}
    speech = PipelineConfig.load("omni_speech", overrides=small)
    pipelines = [speech, gated_pipeline("slow", steps=3)]
    with LiveServer(pipelines, max_running_requests=8) as server:
        yield server


class Talk:
    """An independent client of a session."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    def say(self, kind: str, **content: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **content}))

    def hear(self) -> Any:
        return json.loads(self.socket.recv(timeout=PATIENCE_S))

    def until(self, kind: str, *, is_ok: bool = True) -> list[Any]:
        """The events up to one of this kind; errors fail if ``is_ok``."""
        heard = [self.hear()]
        while heard[-1]["type"] != kind:
            assert not is_ok or heard[-1]["type"] != "error", heard[-1]
            heard.append(self.hear())
        return heard

    def text(self, text: str, role: str = "user") -> None:
        kind = "output_text" if role == "assistant" else "input_text"
        # Older clients write answers as parts of type text.
        sent = "text" if role == "assistant" else kind
        item = {"type": "message", "role": role, "content": [{"type": sent, "text": text}]}
        self.say("conversation.item.create", item=item)
        added = self.until("conversation.item.done")[-1]["item"]
        assert added["content"] == [{"type": kind, "text": text}]


@pytest.fixture
def talk(running: LiveServer) -> Iterator[Talk]:
    with connect(address(running, "omni_speech")) as socket:
        talk = Talk(socket)
        session = talk.hear()["session"]
        assert session["output_modalities"] == ["audio"]
        assert session["audio"]["input"]["turn_detection"]["type"] == "server_vad"
        talk.say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
        talk.until("session.updated")
        yield talk
    running.check_nothing_is_left()


def address(server: LiveServer, model: str) -> str:
    return f"{server.url.replace('http', 'ws')}/v1/realtime?model={model}"


def in_python(server: LiveServer, prompt: ChatPrompt, speaker: str | None = None) -> Any:
    request = OmniRequest(prompt, sampling=SHORT, speaker=speaker)
    (output,) = server.omni("omni_speech").generate([request])
    assert output.error is None
    return output.stages


def test_text_is_answered_and_remembered(running: LiveServer, talk: Talk):
    said: list[dict[str, str]] = []
    for question in ("What is a tide?", "And a wave?"):
        talk.text(question)
        said.append({"role": "user", "content": question})
        talk.say("response.create", response={"stages": SHORT, "instructions": "Be brief."})
        heard = talk.until("response.done")
        system = {"role": "system", "content": "Be brief."}
        expected = in_python(running, ChatPrompt((system, *said)))["thinker"].text
        deltas = [each["delta"] for each in heard if each["type"] == "response.output_text.delta"]
        assert "".join(deltas) == expected and len(deltas) > 1
        done = heard[-1]["response"]
        assert done["status"] == "incomplete"
        assert done["output"][0]["content"] == [{"type": "output_text", "text": expected}]
        assert done["usage"]["output_tokens"] == 10
        said.append({"role": "assistant", "content": expected})


@pytest.mark.parametrize("has_input", [False, True])
def test_a_response_outside_of_the_conversation_leaves_no_trace(
    running: LiveServer, talk: Talk, has_input: bool
):
    talk.text("What is a tide?")
    question = {"role": "user", "content": "Sort the waves." if has_input else "What is a tide?"}
    part = {"type": "input_text", "text": question["content"]}
    item = {"type": "message", "role": "user", "content": [part]}
    wish = {"conversation": "none", "stages": SHORT, "reasoning": {"effort": "low"}}
    talk.say("response.create", response=wish | ({"input": [item]} if has_input else {}))
    heard = talk.until("response.done")
    assert not [each for each in heard if each["type"].startswith("conversation.")]
    expected = in_python(running, ChatPrompt((question,)))["thinker"].text
    (message,) = heard[-1]["response"]["output"]
    assert message["content"][0]["text"] == expected
    talk.say("conversation.item.retrieve", item_id=message["id"])
    assert talk.hear()["error"]["param"] == "item_id"


def test_responses_aside_run_beside_an_answer():
    with (
        LiveServer([gated_pipeline("aside")]) as server,
        connect(address(server, "aside")) as socket,
    ):
        stage = server.omni("aside").pipeline.stages["aside"]
        assert isinstance(stage, GatedStage)
        stage.says_chats = True
        talk = Talk(socket)
        talk.until("session.created")
        talk.text("hello")
        names = []
        for wish in ({}, {"conversation": "none"}, {"conversation": "none"}):
            talk.say("response.create", response=wish)
            names.append(talk.until("response.created")[-1]["response"]["id"])
        talk.say("response.cancel", response_id=names[1])
        done = talk.until("response.done")[-1]["response"]
        assert (done["id"], done["status"]) == (names[1], "cancelled")
        for number in range(4):
            talk.say("response.create", response={"conversation": "none"})
            kind = "error" if number == 3 else "response.created"
            names.append(talk.until(kind, is_ok=False)[-1])
        assert names.pop()["error"]["code"] == "too_many_responses"
        GATES["aside"].open()
        ended = [talk.until("response.done")[-1]["response"] for _ in range(5)]
        assert {names[0], names[2]} < {each["id"] for each in ended}
        assert {each["status"] for each in ended} == {"completed"}


def test_an_image_is_refused_by_a_model_without_images(running: LiveServer):
    url = f"data:image/png;base64,{b64encode(picture()).decode()}"
    item = {"type": "message", "role": "user"}
    parts = [{"type": "input_image", "image_url": url}]
    with connect(address(running, "slow")) as socket:
        talk = Talk(socket)
        talk.until("session.created")
        talk.say("conversation.item.create", item=item | {"content": parts})
        assert talk.hear()["error"]["message"].endswith("this model reads no images")


def test_an_image_beyond_the_limit_is_refused_when_it_is_sent(talk: Talk):
    file = BytesIO()
    Image.new("RGB", (50, 41)).save(file, "PNG")
    url = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
    parts = [{"type": "input_image", "image_url": url}]
    item = {"type": "message", "role": "user", "content": parts}
    talk.say("conversation.item.create", item=item)
    error = talk.hear()["error"]
    assert error["param"] == "item.content[0].image_url"
    assert "max_image_pixels" in error["message"]


def test_an_image_is_seen(running: LiveServer, talk: Talk):
    url = f"data:image/png;base64,{b64encode(picture()).decode()}"
    parts = [{"type": "input_image", "image_url": url, "detail": "low"}]
    parts.append({"type": "input_text", "text": "What is it?"})
    item = {"type": "message", "role": "user", "content": parts}
    hints = {"input": {"noise_reduction": {"type": "near_field"}}}
    talk.say("session.update", session={"audio": hints, "truncation": {"type": "retention_ratio"}})
    assert talk.hear()["type"] == "session.updated"
    talk.say("conversation.item.create", item=item)
    shown = talk.until("conversation.item.done")[-1]["item"]["content"][0]
    assert shown == {"type": "input_image", "image_url": url}
    talk.say("response.create", response={"stages": SHORT})
    done = talk.until("response.done")[-1]["response"]
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    prompt = ChatPrompt(
        ({"role": "user", "content": content},), multi_modal_data={"image": (picture(),)}
    )
    expected = in_python(running, prompt)["thinker"].text
    assert done["output"][0]["content"][0]["text"] == expected


def test_instructions_without_items_are_answered(running: LiveServer, talk: Talk):
    words = "Greet the caller."
    talk.say("response.create", response={"stages": SHORT, "instructions": words})
    done = talk.until("response.done")[-1]["response"]
    expected = in_python(running, ChatPrompt(({"role": "system", "content": words},)))
    assert done["output"][0]["content"][0]["text"] == expected["thinker"].text


def test_sound_is_heard_and_answered_by_voice(running: LiveServer, talk: Talk):
    samples = (tone(0.5) * 2**14).astype("<i2")
    audio = {
        "input": {"format": {"type": "audio/pcm", "rate": 16_000}},
        "output": {"voice": "Ethan"},
    }
    session = {"type": "realtime", "output_modalities": ["audio"], "audio": audio, "stages": SHORT}
    talk.say("session.update", session=session)
    assert talk.hear()["session"]["audio"]["output"]["voice"] == "Ethan"
    content = samples.tobytes()
    for begin in range(0, len(content), 4000):
        piece = b64encode(content[begin : begin + 4000]).decode()
        talk.say("input_audio_buffer.append", audio=piece)
    talk.say("input_audio_buffer.commit")
    talk.until("conversation.item.done")
    talk.say("response.create")
    heard = talk.until("response.done")
    sound = AudioPrompt(samples.astype(np.float32) / 2**15, 16_000)
    message = {"role": "user", "content": [{"type": "audio"}]}
    expected = in_python(running, ChatPrompt((message,), {"audio": [sound]}), "Ethan")
    kinds = [each["type"] for each in heard]
    transcript = "".join(
        each["delta"] for each in heard if each["type"] == "response.output_audio_transcript.delta"
    )
    assert transcript == expected["thinker"].text
    pieces = [each for each in heard if each["type"] == "response.output_audio.delta"]
    found = np.frombuffer(b"".join(b64decode(each["delta"]) for each in pieces), "<i2")
    whole = np.frombuffer(expected["code2wav"].audio.encoded("pcm16"), "<i2").astype(int)
    assert np.abs(found - whole).max() <= 1
    assert {each["rate"] for each in pieces} == {24_000}
    assert kinds[-1] == "response.done" and "response.output_audio.done" in kinds


# The official client uses a deprecated call of websockets.
@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager")
def test_the_official_client_works(running: LiveServer):
    with running.client().realtime.connect(model="omni_speech") as connection:
        connection.session.update(
            session={"type": "realtime", "output_modalities": ["text"], "max_output_tokens": 6}
        )
        part = {"type": "input_text", "text": "What is a tide?"}
        connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": [part]}
        )
        connection.response.create()
        text = ""
        for event in connection:
            assert event.type != "error", event
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type == "response.done":
                break
    done = event.response
    assert (done.status, done.status_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in done.output] == ["incomplete"]
    sampling = {"thinker": {"max_tokens": 6}}
    message = {"role": "user", "content": "What is a tide?"}
    request = OmniRequest(ChatPrompt((message,)), sampling=sampling)
    (expected,) = running.omni("omni_speech").generate([request])
    assert text == expected.stages["thinker"].text


def test_an_answer_is_cancelled_in_the_middle(running: LiveServer, talk: Talk):
    long = {"thinker": {"max_tokens": 1500, "ignore_eos": True}}
    talk.text("Tell me all of it.")
    talk.say("response.create", response={"stages": long})
    begun = talk.until("response.output_text.delta")[-1]["delta"]
    talk.say("response.create")
    talk.say("response.cancel")
    heard = talk.until("response.done", is_ok=False)
    (error,) = [each["error"] for each in heard if each["type"] == "error"]
    assert error["code"] == "conversation_already_has_active_response"
    done = heard[-1]["response"]
    assert done["status"] == "cancelled"
    assert done["output"][0]["content"][0]["text"].startswith(begun)
    running.check_nothing_is_left()
    talk.text("Well?")
    talk.say("response.create", response={"stages": SHORT})
    assert talk.until("response.done")[-1]["response"]["status"] == "incomplete"


def test_a_closed_connection_aborts_only_its_request(running: LiveServer):
    stage = running.omni("slow").pipeline.stages["slow"]
    assert isinstance(stage, GatedStage)
    stage.says_chats = True
    where = address(running, "slow")
    with connect(where) as leaving, connect(where) as staying:
        for talk in (Talk(leaving), Talk(staying)):
            talk.until("session.created")
            talk.text("hello")
            talk.say("response.create")
            talk.until("response.created")
        wait_for(lambda: len(stage.held) == 2)
        leaving.close()
        wait_for(lambda: len(stage.held) == 1)
        GATES["slow"].open()
        assert Talk(staying).until("response.done")[-1]["response"]["status"] == "completed"
    running.check_nothing_is_left()


# An event, or the "session" of a "session.update"; the field of the mistake; and its message.
MISTAKES = rows("""
{ |  | not valid JSON
[] |  | JSON object
{"type": "response.make"} | type | unknown event 'response.make'
{"type": "input_audio_buffer.commit"} |  | the buffer has 0 ms of sound
{"type": "input_audio_buffer.append", "audio": "%"} | audio | not valid base64
{"type": "response.create"} |  | no items
{"type": "response.cancel"} |  | no response is being given
{"type": "response.create", "respons": {}} | respons | did you mean 'response'?
{"output_modalities": ["smell"]} | session.output_modalities[0] | should be
{"model": "other"} | session.model | changed
{"prompt": {"id": "x"}} | session.prompt | the server stores no prompts
{"type": "response.create", "response": {"input": []}} | response.input | needs conversation to be
{"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": \
[{"type": "input_image", "image_url": "/etc/passwd"}]}} | item.content[0].image_url | a data URL
{"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": \
[{"type": "input_image", "image_url": "data:image/png;base64,aGk="}]}} | item.content[0].image_url \
| cannot be read
{"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": \
[{"type": "input_audio", "audio": "YWJjZA=="}]}} | item.content[0].audio | at least 100 ms
{"type": "conversation.item.create", "item": {"type": "item_reference", "id": "a"}} | item.type | \
stands for an existing item
{"type": "response.create", "response": {"conversation": "none", "input": [{"type": \
"item_reference", "id": "a"}]}} | response.input[0].id | there is no item 'a'
{"type": "response.create", "response": {"max_output_tokens": 99999999999999999999}} | \
response.max_output_tokens | less than
{"tool_choice": "required"} | session.tool_choice | needs tools to choose from
{"type": "response.create", "response": {"tool_choice": {"type": "function", "name": "b"}}} | \
response.tool_choice.name | 'b' is none of the tools
{"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": \
[{"type": "input_image", "file_id": "file-1"}]}} | item.content[0].file_id | stores no files
{"output_modalities": []} | session.output_modalities | must not be empty
{"stages": {"nope": {}}} | session.stages.nope | unknown stage
{"stages": {"thinker": {"temperature": -1}}} | session.stages.thinker.temperature | greater than or
{"audio": {"output": {"voice": "Nobody"}}} | session.audio.output.voice | no such voice
{"type": "conversation.item.create", "item": {"type": "message", "role": "assistant", \\
"content": [{"type": "input_audio", "audio": "AAAA"}]}} | item.content[0].type | for items of users
""")


@pytest.mark.parametrize(("event", "param", "message"), MISTAKES)
def test_a_mistake_is_reported_and_the_session_continues(
    running: LiveServer, talk: Talk, event: str, param: str, message: str
):
    said: Any = {}
    if len(event) > 2:
        said = json.loads(event)
        if "type" not in said:
            said = {"type": "session.update", "session": said}
        event = json.dumps({**said, "event_id": "mine"})
    talk.socket.send(event)
    reported = talk.hear()
    assert reported["type"] == "error"
    assert message in reported["error"]["message"], reported
    assert reported["error"]["param"] == (param or None), reported
    assert reported["error"]["event_id"] == ("mine" if said else None)
    talk.text("hello")


def test_an_unknown_voice_of_a_response_is_reported_with_its_field(running: LiveServer, talk: Talk):
    talk.text("hello")
    wish = {"output_modalities": ["audio"], "audio": {"output": {"voice": "Nobody"}}}
    talk.say("response.create", response=wish)
    assert talk.hear()["error"]["param"] == "response.audio.output.voice"


def test_sampling_of_a_session_can_be_reset(talk: Talk):
    for stages in (SHORT, {}):
        talk.say("session.update", session={"type": "realtime", "stages": stages})
        assert talk.hear()["session"]["stages"] == stages


def test_only_the_named_response_is_cancelled(talk: Talk):
    talk.text("Tell me all of it.")
    long = {"thinker": {"max_tokens": 1500, "ignore_eos": True}}
    talk.say("response.create", response={"stages": long})
    name = talk.until("response.created")[-1]["response"]["id"]
    talk.say("response.cancel", response_id="resp_of_somebody_else")
    error = talk.until("error", is_ok=False)[-1]["error"]
    assert error["param"] == "response_id"
    talk.say("response.cancel", response_id=name)
    assert talk.until("response.done")[-1]["response"]["status"] == "cancelled"


def test_a_session_has_one_completion_per_response(server: LiveServer):
    with connect(address(server, "two_step")) as socket:
        talk = Talk(socket)
        talk.until("session.created")
        talk.say("session.update", session={"stages": {"writer": {"n": 3}}})
        assert talk.hear()["error"]["param"] == "session.stages.writer.n"


@pytest.mark.parametrize("rate", [12_000, 48_000])
def test_sound_has_the_requested_rate(running: LiveServer, talk: Talk, rate: int):
    audio = {"output": {"voice": "Ethan", "format": {"type": "audio/pcm", "rate": rate}}}
    talk.text("What is a tide?")
    wish = {"output_modalities": ["audio"], "audio": audio, "stages": SHORT}
    talk.say("response.create", response=wish)
    heard = talk.until("response.done")
    pieces = [each for each in heard if each["type"] == "response.output_audio.delta"]
    assert {each["rate"] for each in pieces} == {rate} and len(pieces) > 1
    found = np.frombuffer(b"".join(b64decode(each["delta"]) for each in pieces), "<i2")
    message = {"role": "user", "content": "What is a tide?"}
    sound = in_python(running, ChatPrompt((message,)), "Ethan")["code2wav"].audio
    expected = soxr.resample(sound.samples.numpy(), sound.sampling_rate, rate)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found / 32767, expected.clip(-1, 1), rtol=0, atol=1e-4)


def test_the_number_of_sessions_is_limited():
    with LiveServer([gated_pipeline("few")], max_sessions=1) as server:
        where = address(server, "few")
        with connect(where) as first:
            Talk(first).until("session.created")
            with connect(where) as second:
                assert Talk(second).hear()["error"]["code"] == "too_many_sessions"
                with pytest.raises(ConnectionClosed, match="1013"):
                    second.recv(timeout=PATIENCE_S)
        wait_for(lambda: not server.pipelines.num_sessions)
        with connect(where) as third:
            assert Talk(third).hear()["type"] == "session.created"


def test_a_client_that_disconnects_during_errors_is_not_logged_as_an_error(
    running: LiveServer, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        for _ in range(10):
            with connect(address(running, "slow")) as leaving:
                for _ in range(50):
                    leaving.send(json.dumps({"type": "x"}))
                # Reset the connection, which drops all data in flight.
                linger = struct.pack("ii", 1, 0)
                leaving.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                leaving.socket.close()
        wait_for(lambda: not running.pipelines.num_sessions)
    # The client logs an error: its socket was closed.
    reported = [each for each in caplog.records if not each.name.startswith("websockets.client")]
    assert not [each for each in reported if each.levelno >= logging.ERROR], caplog.text


def test_the_size_of_a_session_is_limited():
    with (
        LiveServer([gated_pipeline("small")], max_body_bytes=4096) as server,
        connect(address(server, "small")) as socket,
    ):
        talk = Talk(socket)
        talk.until("session.created")
        piece = b64encode(bytes(2000)).decode()
        for _ in range(3):
            talk.say("input_audio_buffer.append", audio=piece)
        assert talk.hear()["error"]["code"] == "session_full"
        talk.say("input_audio_buffer.clear")
        assert talk.hear()["type"] == "input_audio_buffer.cleared"
        socket.send("x" * 5000)
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=PATIENCE_S)


def test_an_unknown_model_ends_the_session(running: LiveServer):
    with connect(address(running, "nobody")) as socket:
        assert Talk(socket).hear()["error"]["code"] == "model_not_found"
        with pytest.raises(ConnectionClosed, match="nobody"):
            socket.recv(timeout=PATIENCE_S)


def test_sessions_need_a_key_and_refuse_foreign_pages():
    with LiveServer([gated_pipeline("keyed")], api_keys=["secret"]) as server:
        where = address(server, "keyed")
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with (
                pytest.raises(InvalidStatus, match="403"),
                connect(where, additional_headers=headers),
            ):
                pass
        right = {"Authorization": "Bearer secret"}
        with (
            pytest.raises(InvalidStatus, match="403"),
            connect(where, additional_headers=right, origin="https://evil.example"),
        ):
            pass
        with connect(where, additional_headers=right) as socket:
            assert Talk(socket).hear()["type"] == "session.created"
        protocols = ["realtime", "openai-insecure-api-key.secret"]
        with connect(where, subprotocols=protocols) as socket:
            assert Talk(socket).hear()["type"] == "session.created"
            assert socket.subprotocol == "realtime"


def test_options_of_a_response_override_those_of_its_session():
    options = {"audio": {"output": {"voice": "Ethan"}}}
    bias = {"logit_bias": {"5": 1.0}}
    before = ResponseOptions.model_validate({**options, "stages": {"thinker": bias, "talker": {}}})
    change: dict[str, Any] = {"audio": {"output": {"format": {"type": "audio/pcm", "rate": 8000}}}}
    change["stages"] = {"thinker": {"logit_bias": {"6": 1.0}, "seed": 1}}
    merged = merge_options(before, ResponseOptions.model_validate(change))
    assert merged.audio.output.voice == "Ethan" and merged.audio.output.format.rate == 8000
    assert merged.stages == {
        "thinker": {"logit_bias": {"6": 1.0}, "seed": 1},
        "talker": {},
    }


class SlowSocket:
    """A connection that blocks events of one kind until the test continues it."""

    def __init__(self, slow: str) -> None:
        self.slow = slow
        self.is_blocked = asyncio.Event()
        self.continues = asyncio.Event()
        self.heard: list[Any] = []
        self.says: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def send_text(self, text: str) -> None:
        event = json.loads(text)
        if event["type"] == self.slow:
            self.is_blocked.set()
            await self.continues.wait()
        self.heard.append(event)

    async def receive(self) -> dict[str, Any]:
        return await self.says.get()

    def say(self, **event: Any) -> None:
        self.says.put_nowait({"type": "websocket.receive", "text": json.dumps(event)})

    def heard_of(self, kind: str) -> list[Any]:
        return [each for each in self.heard if each["type"] == kind]


@pytest.mark.parametrize("slow", ["response.output_text.done", "error"])
def test_a_finished_response_cannot_be_cancelled_while_its_end_is_sent(
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
        await slow_one.is_blocked.wait()
        slow_one.slow = ""
        slow_one.say(type="response.cancel")
        while not slow_one.heard_of("error"):
            await asyncio.sleep(0)
        slow_one.continues.set()
        while not slow_one.heard_of("response.done"):
            await asyncio.sleep(0)
        slow_one.says.put_nowait({"type": "websocket.disconnect"})
        await task
        said = [each.role for each in session._conversation.items]
        assert said == (["user"] if slow == "error" else ["user", "assistant"])
        return slow_one

    heard = asyncio.run(asyncio.wait_for(talk(), PATIENCE_S))
    assert heard.heard_of("error")[0]["error"]["code"] == "response_cancel_not_active"
    (done,) = heard.heard_of("response.done")
    assert done["response"]["status"] == ("failed" if slow == "error" else "incomplete")


class GoneSocket:
    """A connection that fails at the first send and then reports the disconnect."""

    num_sent = 0

    async def send_text(self, _: str) -> None:
        self.num_sent += 1
        raise WebSocketDisconnect(1006)

    async def receive(self) -> dict[str, Any]:
        return {"type": "websocket.disconnect"}


def test_a_disconnected_client_is_sent_nothing_more(server: LiveServer):
    gone: Any = GoneSocket()
    pipeline = server.pipelines.find("chat")
    session = RealtimeSession(gone, server.pipelines, pipeline, Client("id", None))
    asyncio.run(session.run())
    assert gone.num_sent == 1
