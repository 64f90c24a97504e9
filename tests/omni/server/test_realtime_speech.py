"""Turns of speech, barge-in, transcriptions and tools, by the types of OpenAI's client."""

from __future__ import annotations

import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any, get_args

import numpy as np
import openai
import pytest
import soundfile
import soxr
from openai.types.beta.realtime import RealtimeServerEvent as OlderEvent
from openai.types.realtime import RealtimeServerEvent
from pydantic import BaseModel
from websockets.sync.client import ClientConnection, connect

from omni import AudioPrompt
from omni.pipelines.pipeline_config import PipelineConfig
from omni.server.openai.realtime_conversation import samples_of, telephone_code
from omni.server.openai.realtime_events import AudioFormat
from tests.omni.server.test_tools import ADD
from tests.support.live_server import LiveServer
from tests.support.one_writer import one_writer
from tests.support.patience import PATIENCE_S

RATE = 24_000
SUM = {"type": "input_text", "text": "twelve plus thirty"}
SOUND = "response.output_audio.delta"
TOOL = {"type": "function", "name": "add", "parameters": ADD}
Kinds = dict[str, type[BaseModel]]


def by_kind(union: Any) -> Kinds:
    """The types of a client's events, by the kind of event that each is of."""
    types = get_args(get_args(union)[0])
    return {get_args(each.model_fields["type"].annotation)[0]: each for each in types}


NEWER, OLDER = by_kind(RealtimeServerEvent), by_kind(OlderEvent)


def pipeline(name: str, model: str, **sampling: Any) -> PipelineConfig:
    engine = {"num_blocks": 512, "max_num_batched_tokens": 512}
    return one_writer(name, model=model, engine=engine, sampling={"temperature": 0.0, **sampling})


@pytest.fixture(scope="module")
def server(checkpoint_cache: object) -> Iterator[LiveServer]:
    ears = pipeline("ears", "seeded:whisper", max_tokens=12)
    reader = pipeline("reader", "seeded:qwen2", max_tokens=6)
    aliases = {"gpt-realtime": "reader", "whisper-1": "ears"}
    configs = ["spoken_sums", reader, ears]
    with LiveServer(configs, aliases=aliases, transcriber="ears") as running:
        yield running
        running.check_nothing_is_left()


class Talk:
    """A client that checks each event against the type that OpenAI's client has for it."""

    def __init__(self, socket: ClientConnection, known: Kinds = NEWER) -> None:
        self.socket = socket
        self.known = known

    def say(self, kind: str, **content: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **content}))

    def hear(self) -> Any:
        event = json.loads(self.socket.recv(timeout=PATIENCE_S))
        known = json.loads(json.dumps(event))
        if self.known is OLDER and "session" in known:
            known["session"].pop("model", None)  # of its own models alone
            known["session"]["client_secret"] = {"expires_at": 0, "value": ""}  # of calls by REST
        self.known[event["type"]].model_validate(known)
        return event

    def until(self, *kinds: str) -> list[Any]:
        """Events to one of each of these kinds."""
        heard: list[Any] = []
        while not set(kinds) <= {each["type"] for each in heard}:
            heard.append(self.hear())
            assert heard[-1]["type"] != "error", heard[-1]
        return heard

    def set(self, **session: Any) -> Any:
        self.say("session.update", session={"type": "realtime", **session})
        return self.until("session.updated")[-1]["session"]

    def speak(self, samples: np.ndarray, rate: int = RATE) -> None:
        """Send sound in pieces of a tenth of a second."""
        content = (samples * 32767).astype("<i2").tobytes()
        for begin in range(0, len(content), rate // 5):
            piece = b64encode(content[begin : begin + rate // 5]).decode()
            self.say("input_audio_buffer.append", audio=piece)

    def text(self, text: str) -> str:
        part = {"type": "input_text", "text": text}
        self.say("conversation.item.create", item=message(part))
        return self.until("conversation.item.done")[-1]["item"]["id"]

    def item(self, item_id: str) -> Any:
        self.say("conversation.item.retrieve", item_id=item_id)
        return self.until("conversation.item.retrieved")[-1]["item"]

    def mistake(self, kind: str, **content: Any) -> Any:
        self.say(kind, **content)
        event = self.hear()
        assert event["type"] == "error", event
        return event["error"]


def message(part: Any) -> Any:
    return {"type": "message", "role": "user", "content": [part]}


@contextmanager
def talk(server: LiveServer, model: str, known: Kinds = NEWER, **headers: str) -> Iterator[Talk]:
    url = f"{server.url.replace('http', 'ws')}/v1/realtime?model={model}"
    with connect(url, additional_headers=headers, max_size=None) as socket:
        talk = Talk(socket, known)
        assert talk.hear()["type"] == "session.created"
        yield talk


def question(name: str = "twelve_plus_thirty", before_s: float = 0.6, after_s: float = 1.0) -> Any:
    """A recorded question between silences, at the rate that sessions have."""
    file = resources.files("stage_configs") / f"spoken_sums/questions/{name}.flac"
    with file.open("rb") as opened:
        samples, rate = soundfile.read(opened, dtype="float32")
    samples = soxr.resample(samples, rate, RATE)
    silences = (np.zeros(round(each * RATE), np.float32) for each in (before_s, after_s))
    before, after = silences
    return np.concatenate([before, samples, after])


def of_kind(heard: list[Any], kind: str) -> list[Any]:
    return [each for each in heard if each["type"] == kind]


def test_speech_ends_by_itself_and_is_written_down_and_answered_by_voice(server: LiveServer):
    with talk(server, "spoken_sums") as one:
        one.set(audio={"input": {"transcription": {"model": "gpt-4o-transcribe"}}})
        one.speak(question())
        written = "conversation.item.input_audio_transcription.completed"
        heard = one.until("response.done", written)
        kinds = [each["type"] for each in heard]
        order = ["speech_started", "speech_stopped", "committed"]
        at = [kinds.index(f"input_audio_buffer.{each}") for each in order]
        assert at == sorted(at) and at[-1] < kinds.index("response.created")
        started, stopped, committed = (heard[place] for place in at)
        assert started["item_id"] == stopped["item_id"] == committed["item_id"]
        # 300 ms before the speech, which begins about 0.6 s after all sound.
        assert 200 <= started["audio_start_ms"] <= 700
        item = one.item(committed["item_id"])
        (part,) = item["content"]
        samples = np.frombuffer(b64decode(part["audio"]), "<i2").astype(np.float32) / 2**15
        length_ms = stopped["audio_end_ms"] - started["audio_start_ms"]
        assert len(samples) / RATE * 1000 == pytest.approx(length_ms, abs=1)
        begin = round(started["audio_start_ms"] / 1000 * RATE)
        sent = question()[begin : begin + len(samples)]
        np.testing.assert_allclose(samples, sent, atol=2**-14)
        (expected,) = server.omni("ears").generate([AudioPrompt(samples, RATE)])
        text = expected.stages["writer"].text.strip()
        assert of_kind(heard, written)[0]["transcript"] == text == part["transcript"] != ""
        (answer,) = of_kind(heard, "response.done")[0]["response"]["output"]
        assert answer["content"][0]["transcript"] == "12 + 30 = forty two"
        assert of_kind(heard, "response.output_audio.delta")


@pytest.mark.parametrize("model", ["", "ears"])
def test_a_session_of_transcriptions_writes_down_and_answers_nothing(
    server: LiveServer, model: str
):
    with talk(server, f"{model}&intent=transcription") as one:
        transcription = {"model": "gpt-4o-transcribe", "language": "en"}
        session = one.set(type="transcription", audio={"input": {"transcription": transcription}})
        assert session["type"] == "transcription"
        one.speak(question())
        written = "conversation.item.input_audio_transcription.completed"
        heard = one.until(written)
        (committed,) = of_kind(heard, "input_audio_buffer.committed")
        (part,) = one.item(committed["item_id"])["content"]
        samples = np.frombuffer(b64decode(part["audio"]), "<i2").astype(np.float32) / 2**15
        prompt = AudioPrompt(samples, RATE, language="en")
        (expected,) = server.omni("ears").generate([prompt])
        text = expected.stages["writer"].text.strip()
        assert of_kind(heard, written)[0]["transcript"] == text != ""
        assert "answers nothing" in one.mistake("response.create")["message"]
        wrong = one.mistake("session.update", session={"type": "realtime"})
        assert wrong["param"] == "session.type"


def test_a_session_speaks_faster_where_that_is_asked(server: LiveServer):
    spoken = []
    with talk(server, "spoken_sums") as one:
        for speed in (1.0, 1.5):
            one.set(audio={"output": {"speed": speed}})
            one.say("conversation.item.create", item=message(SUM) | {"id": f"sum-{speed}"})
            one.say("response.create")
            heard = one.until("response.done")
            sound = b"".join(b64decode(each["delta"]) for each in of_kind(heard, SOUND))
            spoken.append(len(sound) / 2 / RATE)
            (answer,) = of_kind(heard, "response.done")[0]["response"]["output"]
            for item in (answer["id"], f"sum-{speed}"):
                one.say("conversation.item.delete", item_id=item)
    assert spoken[1] == pytest.approx(spoken[0] / 1.5, abs=0.15)


def test_silence_noise_and_tones_begin_nothing(server: LiveServer):
    rng = np.random.default_rng(0)
    tone = 0.3 * np.sin(np.arange(RATE) * 2 * np.pi * 440 / RATE)
    with talk(server, "spoken_sums") as one:
        one.speak(np.concatenate([np.zeros(RATE), 0.05 * rng.standard_normal(RATE), tone]))
        one.say("input_audio_buffer.clear")
        assert one.hear()["type"] == "input_audio_buffer.cleared"
        # What was no speech is forgotten, so that a session of hours holds little.
        one.speak(question())
        assert one.until("response.created")[0]["audio_start_ms"] > 3000
        one.say("response.cancel")


def test_speaking_over_an_answer_ends_it_and_keeps_what_was_heard(server: LiveServer):
    with talk(server, "spoken_sums") as one:
        one.set(
            stages={
                "thinker": {"ignore_eos": True, "max_tokens": 200},
                "talker": {"ignore_eos": True, "max_tokens": 250},
            }
        )
        one.text("twelve plus thirty")
        one.say("response.create", response={"metadata": {"mine": "1"}})
        begun = one.until("response.output_audio.delta")
        created = of_kind(begun, "response.created")[0]["response"]
        assert created["metadata"] == {"mine": "1"}
        item_id = begun[-1]["item_id"]
        assert "in progress" in one_error(one, item_id)
        one.speak(question(before_s=0.0, after_s=0.0))
        heard = one.until("response.done")
        assert of_kind(heard, "input_audio_buffer.speech_started")
        done = heard[-1]["response"]
        assert done["status"] == "cancelled"
        assert done["status_details"]["reason"] == "turn_detected"
        said = "".join(
            each["delta"]
            for each in begun + heard
            if each["type"] == "response.output_audio_transcript.delta"
        )
        item = one.item(item_id)
        kept = item["content"][0]["transcript"]
        assert item["status"] == "incomplete"
        assert said.startswith(kept) and len(kept) < len(said)
        # What goes on is another turn, which is answered in its time.
        one.set(stages={})
        one.speak(np.zeros(RATE))
        assert one.until("response.done")[-1]["response"]["status"] == "completed"


def one_error(one: Talk, item_id: str) -> str:
    """Why an item cannot be truncated, past what else is said meanwhile."""
    one.say("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=0)
    while (event := one.hear())["type"] != "error":
        pass
    return str(event["error"]["message"]).replace("still being given", "in progress")


def test_an_answer_is_cut_to_what_its_client_has_played(server: LiveServer):
    with talk(server, "spoken_sums") as one:
        first = one.text("seventeen plus five")
        one.say("response.create")
        heard = one.until("response.done")
        sound = b"".join(
            b64decode(each["delta"]) for each in of_kind(heard, "response.output_audio.delta")
        )
        length_ms = len(sound) // 2 * 1000 // RATE
        (item,) = heard[-1]["response"]["output"]
        whole = item["content"][0]["transcript"]
        about = {"item_id": item["id"], "content_index": 0}
        kept = [whole]
        for share in (1.0, 0.5, 0.9, 0.0):
            end_ms = int(share * length_ms)
            one.say("conversation.item.truncate", **about, audio_end_ms=end_ms)
            assert one.hear()["audio_end_ms"] == end_ms
            kept.append(one.item(item["id"])["content"][0]["transcript"])
        assert all(whole.startswith(each) for each in kept)
        assert kept[1] == whole and len(kept[2]) <= 0.5 * len(whole) < len(kept[3])
        assert kept[4] == ""
        wrong = one.mistake("conversation.item.truncate", **about, audio_end_ms=length_ms + 1000)
        assert wrong["param"] == "audio_end_ms"
        wrong = one.mistake(
            "conversation.item.truncate", item_id=first, content_index=0, audio_end_ms=0
        )
        assert "no answer that was spoken" in wrong["message"]


def test_items_stand_where_they_are_put_and_go_when_they_are_deleted(server: LiveServer):
    with talk(server, "reader") as one:
        ids = [one.text(word) for word in ("one", "two")]
        for previous, follows in ((ids[0], ids[0]), ("root", None)):
            part = {"type": "input_text", "text": "between"}
            one.say("conversation.item.create", previous_item_id=previous, item=message(part))
            assert one.until("conversation.item.done")[-1]["previous_item_id"] == follows
        one.say("conversation.item.delete", item_id=ids[0])
        assert one.hear()["item_id"] == ids[0]
        for kind in ("delete", "retrieve"):
            wrong = one.mistake(f"conversation.item.{kind}", item_id=ids[0])
            # As OpenAI's API has them: clients such as Pipecat know these, and end with others.
            assert wrong["code"] == f"item_{kind}_invalid_item_id" and wrong["param"] == "item_id"
        part = {"type": "input_text", "text": "again"}
        again = {**message(part), "id": ids[1]}
        assert one.mistake("conversation.item.create", item=again)["param"] == "item.id"


def test_tools_are_called_and_what_they_return_is_answered(server: LiveServer):
    with talk(server, "reader") as one:
        one.set(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        one.text("How much is it?")
        one.say("response.create", response={"max_output_tokens": 100})
        heard = one.until("response.done")
        (done,) = of_kind(heard, "response.function_call_arguments.done")
        arguments = json.loads(done["arguments"])
        assert done["name"] == "add" and arguments["a"] in (1, 2)
        (item,) = heard[-1]["response"]["output"]
        assert item["type"] == "function_call" and item["call_id"] == done["call_id"]
        assert json.loads(item["arguments"]) == arguments
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
        one.say("conversation.item.create", item=result)
        one.until("conversation.item.done")
        one.say("response.create", response={"tool_choice": "none"})
        (answer,) = one.until("response.done")[-1]["response"]["output"]
        assert answer["type"] == "message"
        many = {"type": "function", "name": "x"}
        wrong = one.mistake("session.update", session={"tools": [many, many]})
        assert "twice" in wrong["message"]


def test_calls_are_not_spoken(server: LiveServer):
    """Of a pipeline that speaks, whose template shows no tools, the refusal has the reason."""
    with talk(server, "spoken_sums") as one:
        one.set(tools=[TOOL])
        one.text("twelve plus thirty")
        one.say("response.create")
        heard = [one.hear()]
        while heard[-1]["type"] != "response.done":
            heard.append(one.hear())
        assert heard[-1]["response"]["status"] == "failed"
        assert "tools" in of_kind(heard, "error")[0]["error"]["message"]


def test_a_model_that_reads_alone_is_spoken_to_through_the_transcriber(server: LiveServer):
    with talk(server, "reader") as one:
        one.speak(question())
        written = "conversation.item.input_audio_transcription.completed"
        heard = one.until("response.done", written)
        kinds = [each["type"] for each in heard]
        assert kinds.index(written) < kinds.index("response.output_text.delta")
        text = of_kind(heard, written)[0]["transcript"]
        answer = of_kind(heard, "response.done")[0]["response"]["output"][0]["content"][0]["text"]
        with server.client() as client:
            chat = [{"role": "user", "content": text}]
            whole = client.chat.completions.create(model="reader", messages=chat)
        assert answer == whole.choices[0].message.content


def test_pipelines_have_further_names(server: LiveServer):
    with server.client() as client:
        names = [model.id for model in client.models.list()]
        assert names == ["spoken_sums", "reader", "ears"]
        assert client.models.retrieve("gpt-realtime").id == "gpt-realtime"
        chat = [{"role": "user", "content": "Hello"}]
        one, other = (
            client.chat.completions.create(model=name, messages=chat)
            for name in ("reader", "gpt-realtime")
        )
        assert one.choices[0].message.content == other.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="did you mean 'gpt-realtime'"):
            client.models.retrieve("gpt-realtim")
    with talk(server, "gpt-realtime") as session:
        transcription = {"model": "whisper-1"}
        session.set(model="gpt-realtime", audio={"input": {"transcription": transcription}})
        wrong = session.mistake("session.update", session={"type": "realtime", "model": "ears"})
        assert wrong["param"] == "session.model"


@pytest.mark.parametrize(("kind", "subtype"), [("audio/pcmu", "ULAW"), ("audio/pcma", "ALAW")])
def test_telephones_have_the_codes_of_libsndfile(kind: str, subtype: str, tmp_path: Any):
    codes = bytes(range(256))
    form = {"samplerate": 8000, "channels": 1, "format": "RAW", "subtype": subtype}
    path = tmp_path / "codes.raw"
    path.write_bytes(codes)
    expected, _ = soundfile.read(path, dtype="int16", **form)
    found = np.frombuffer(samples_of(codes, AudioFormat.model_validate({"type": kind})), "<i2")
    np.testing.assert_array_equal(found, expected)
    every = np.arange(-(2**15), 2**15).astype("<i2")
    soundfile.write(path, every, 8000, format="RAW", subtype=subtype)
    theirs, _ = soundfile.read(path, dtype="int16", **form)
    ours = np.frombuffer(
        samples_of(
            telephone_code(every.tobytes(), kind), AudioFormat.model_validate({"type": kind})
        ),
        "<i2",
    )
    error, allowed = (np.abs(each.astype(int) - every) for each in (ours, theirs))
    assert (error <= allowed).all()


def test_a_telephone_is_heard(server: LiveServer):
    with talk(server, "spoken_sums") as one:
        form = {"type": "audio/pcmu"}
        session = one.set(audio={"input": {"format": form}}, output_modalities=["text"])
        assert session["audio"]["input"]["format"] == {"type": "audio/pcmu", "rate": 8000}
        low = soxr.resample(question(), RATE, 8000)
        content = telephone_code((low * 32767).astype("<i2").tobytes(), "audio/pcmu")
        for begin in range(0, len(content), 160):
            piece = b64encode(content[begin : begin + 160]).decode()
            one.say("input_audio_buffer.append", audio=piece)
        heard = one.until("response.done")
        # What the model makes of so narrow a band is its own matter: it was given these samples.
        started, stopped = (
            of_kind(heard, f"input_audio_buffer.speech_{each}")[0]
            for each in ("started", "stopped")
        )
        begin, end = started["audio_start_ms"] * 8, stopped["audio_end_ms"] * 8
        sent = samples_of(content, AudioFormat.model_validate(form))[2 * begin : 2 * end]
        codes = b64decode(one.item(started["item_id"])["content"][0]["audio"])
        assert abs(len(codes) - (end - begin)) < 100, "one byte a sample"
        found = samples_of(codes, AudioFormat.model_validate(form))
        assert found[100:-100] in sent or sent[100:-100] in found
        one.say("input_audio_buffer.append", audio=b64encode(content[:4000]).decode())
        wrong = {"input": {"format": {"type": "audio/pcma", "rate": 16_000}}}
        error = one.mistake("session.update", session={"audio": wrong})
        assert error["param"] == "session.audio.input.format.rate" and "8000" in error["message"]


def test_a_format_does_not_change_below_what_is_in_the_buffer(server: LiveServer):
    with talk(server, "spoken_sums") as one:
        one.set(audio={"input": {"turn_detection": None}})
        one.speak(np.zeros(2400))
        wrong = {"input": {"format": {"type": "audio/pcmu"}}}
        error = one.mistake("session.update", session={"audio": wrong})
        assert error["param"] == "session.audio.input.format" and "commit" in error["message"]
        one.say("input_audio_buffer.clear")
        one.until("input_audio_buffer.cleared")
        assert one.set(audio=wrong)["audio"]["input"]["format"]["rate"] == 8000


def test_clients_of_the_beta_are_answered_in_its_names(server: LiveServer):
    headers = {"OpenAI-Beta": "realtime=v1"}
    with talk(server, "spoken_sums", OLDER, **headers) as one:
        session = {
            "modalities": ["text", "audio"],
            "voice": "Ben",
            "input_audio_format": "pcm16",
            "output_audio_format": "g711_ulaw",
            "turn_detection": {"type": "server_vad", "silence_duration_ms": 300},
            "input_audio_transcription": {"model": "whisper-1"},
            "max_response_output_tokens": 24,
        }
        one.say("session.update", session=session)
        shown = one.until("session.updated")[-1]["session"]
        assert {key: shown[key] for key in session.keys() - {"turn_detection"}} == {
            key: value for key, value in session.items() if key != "turn_detection"
        }
        one.speak(question())
        heard = one.until("response.done")
        for kind in ("audio.delta", "audio_transcript.delta", "audio.done", "content_part.added"):
            assert of_kind(heard, f"response.{kind}"), kind
        assert {each["rate"] for each in of_kind(heard, "response.audio.delta")} == {8000}
        assert of_kind(heard, "conversation.item.created")
        assert not of_kind(heard, "conversation.item.added")
        response = heard[-1]["response"]
        assert response["modalities"] == ["text", "audio"] and "output_modalities" not in response
        wrong_formats: list[Any] = ["opus", {}, ["pcm16"]]
        for wrong in wrong_formats:
            error = one.mistake("session.update", session={"input_audio_format": wrong})
            assert "pcm16" in error["message"]
        error = one.mistake("transcription_session.update", session={})
        assert "type 'realtime'" in error["message"]


def test_a_typed_question_to_a_model_that_only_hears_is_refused(server: LiveServer):
    with talk(server, "ears") as one:
        one.speak(question())
        one.until("response.done")
        one.say("conversation.item.create", item=message({"type": "input_text", "text": "Again?"}))
        one.until("conversation.item.done")
        one.say("response.create")
        while (event := one.hear())["type"] != "error":
            pass
        assert "nothing was said" in event["error"]["message"]


def test_a_session_of_transcriptions_has_the_names_of_the_beta(server: LiveServer):
    with talk(server, "ears&intent=transcription", OLDER, **{"OpenAI-Beta": "realtime=v1"}) as one:
        options = {
            "input_audio_format": "pcm16",
            "input_audio_transcription": {"model": "whisper-1", "prompt": "Clocks."},
        }
        one.say("transcription_session.update", session=options)
        session = one.until("transcription_session.updated")[-1]["session"]
        assert session.items() >= options.items() and "modalities" not in session
        one.speak(question())
        written = "conversation.item.input_audio_transcription.completed"
        assert of_kind(one.until(written), written)[0]["transcript"]


def test_twenty_conversations_are_held_at_once(server: LiveServer):
    answers: list[str] = []

    def ask() -> None:
        with talk(server, "spoken_sums") as one:
            one.set(output_modalities=["text"])
            one.speak(question(before_s=0.2, after_s=0.8))
            answer = one.until("response.done")[-1]["response"]
            answers.append(answer["output"][0]["content"][0]["text"])

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(answers) == 20 and set(answers) == {answers[0]} and "forty two" in answers[0]
