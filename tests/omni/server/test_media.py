"""Images, video and sound in requests, and sound in answers, equal to Omni in Python."""

from __future__ import annotations

import http.server
import io
import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
import pytest
import soundfile

from omni import AudioPrompt, ChatPrompt, OmniRequest
from omni.pipelines.pipeline_config import PipelineConfig
from omni.server.serving import url_fetcher
from omni.server.serving.settings import ServerLimits
from omni.server.serving.url_fetcher import UrlFetcher
from tests.support.fake_speech_kind import fake_speech
from tests.support.http_call import call
from tests.support.live_server import LiveServer
from tests.support.media_requests import in_python, picture, sound
from tests.support.patience import PATIENCE_S
from tests.support.videos import moving_picture, video_file

MODEL = {"model": "omni_speech"}
SHORT = {"thinker": {"max_tokens": 8}, "talker": {"max_tokens": 16}}


def silent() -> PipelineConfig:
    """A pipeline with speech whose talker stops at its first token."""
    return PipelineConfig.load(
        "omni_speech",
        overrides={
            "name": "silent",
            "stages.talker.sampling.stop_token_ids": list(range(264)),
            "stages.thinker.sampling.max_tokens": 8,
        },
    )


@pytest.fixture(scope="module")
def media(checkpoint_cache: object) -> Iterator[LiveServer]:
    stage = {"kind": "autoregressive", "model": "seeded:llava", "final_output": "text"}
    stage["engine"] = {"num_blocks": 128}  # type: ignore[assignment]
    stage["sampling"] = {"temperature": 0.0, "max_tokens": 8}  # type: ignore[assignment]
    seeing = PipelineConfig.model_validate({"name": "seeing", "stages": {"seer": stage}})
    whole = {"name": "whole", "stages": {"seer": stage | {"model": "seeded:gemma3_vision"}}}
    names = ["omni_speech", "transcribe_then_summarize", "encode_then_generate", seeing, silent()]
    names.append(PipelineConfig.model_validate(whole))
    with LiveServer(names) as server:
        yield server
        server.check_nothing_is_left()


@pytest.fixture(scope="module")
def client(media: LiveServer) -> Any:
    return media.client()


def heard(content: bytes) -> np.ndarray:
    samples, rate = soundfile.read(io.BytesIO(content), dtype="int16")
    assert rate == 24_000
    return samples


def question(kind: str = "wav") -> list[Any]:
    audio = {"data": b64encode(sound(kind)).decode(), "format": kind}
    parts = [
        {"type": "input_audio", "input_audio": audio},
        {"type": "text", "text": "What was that?"},
    ]
    return [{"role": "user", "content": parts}]


def spoken_request(kind: str = "wav", speaker: str | None = None) -> OmniRequest:
    parts = [{"type": "audio"}, {"type": "text", "text": "What was that?"}]
    prompt = ChatPrompt(({"role": "user", "content": parts},), {"audio": [sound(kind)]})
    return OmniRequest(prompt, sampling=SHORT, speaker=speaker)


@pytest.mark.parametrize("language", [{}, {"language": "en"}])
def test_a_model_with_sound_transcribes(media: LiveServer, client: Any, language: dict[str, Any]):
    answer = client.audio.transcriptions.create(**MODEL, file=("a.wav", sound()), **language)
    message = {"role": "user", "content": [{"type": "audio"}]}
    prompt = ChatPrompt((message,), {"audio": [sound()]})
    assert (
        answer.text == in_python(media, "omni_speech", OmniRequest(prompt)).stages["thinker"].text
    )


def test_a_cascade_answers_sound(media: LiveServer, client: Any):
    model = "transcribe_then_summarize"
    heard_only = [{"role": "user", "content": question()[0]["content"][:1]}]
    answer = client.chat.completions.create(model=model, messages=heard_only)
    expected = in_python(media, model, OmniRequest(AudioPrompt(sound()))).stages
    assert answer.choices[0].message.content == expected["summarizer"].text != ""
    with pytest.raises(openai.BadRequestError, match="no earlier turns; got 1 audio and text"):
        client.chat.completions.create(model=model, messages=question())


def test_an_unsupported_transcription_is_refused_with_the_reason(client: Any):
    for model, fields, reported in (
        ("omni_speech", {"response_format": "verbose_json"}, "timestamps is for speech models"),
        ("seeing", {}, "this model takes no audio; it takes image"),
    ):
        with pytest.raises(openai.BadRequestError, match=reported):
            client.audio.transcriptions.create(model=model, file=("a.wav", sound()), **fields)


@pytest.mark.parametrize(
    ("model", "kind"),
    [("seeing", "image"), ("whole", "image"), ("omni_speech", "image"), ("omni_speech", "video")],
)
def test_images_and_videos_are_answered(media: LiveServer, client: Any, model: str, kind: str):
    content = picture() if kind == "image" else video_file("mp4", moving_picture(8))
    mime = "image/png" if kind == "image" else "video/mp4"
    where = {"url": f"data:{mime};base64,{b64encode(content).decode()}"}
    where |= {"detail": "auto"} if kind == "image" else {}
    question = {"type": "text", "text": "What is this?"}
    parts: list[Any] = [{"type": f"{kind}_url", f"{kind}_url": where}, question]
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": parts}], max_tokens=8
    )
    said = [{"type": kind}, question]
    prompt = ChatPrompt(({"role": "user", "content": said},), {kind: [content]})
    request = OmniRequest(prompt, sampling=SHORT if model == "omni_speech" else {})
    expected = next(iter(in_python(media, model, request).stages.values()))
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens
    streamed = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": parts}], max_tokens=8, stream=True
    )
    pieces = [each.choices[0].delta.content or "" for each in streamed if each.choices]
    assert "".join(pieces) == expected.text


class Pictures(http.server.BaseHTTPRequestHandler):
    """Returns one picture at every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(picture())

    def log_message(self, *_: Any) -> None:
        pass


def test_an_image_is_fetched_from_an_allowed_host(
    media: LiveServer, client: Any, monkeypatch: pytest.MonkeyPatch
):
    fetcher = UrlFetcher(["127.0.0.1"], ServerLimits(url_timeout_s=PATIENCE_S))
    monkeypatch.setattr(url_fetcher, "is_public", lambda _: True)
    monkeypatch.setattr(media.pipelines, "fetcher", fetcher)
    with http.server.HTTPServer(("127.0.0.1", 0), Pictures) as host:
        thread = threading.Thread(target=host.serve_forever, daemon=True)
        thread.start()
        answers = [
            client.chat.completions.create(
                model="seeing",
                messages=[
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
                ],
            ).choices[0]
            for url in (
                f"http://127.0.0.1:{host.server_port}/a.png",
                f"data:image/png;base64,{b64encode(picture()).decode()}",
            )
        ]
        host.shutdown()
        thread.join()
    fetcher.close()
    assert answers[0].message.content == answers[1].message.content != ""


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3", "url"])
def test_sound_is_answered(media: LiveServer, client: Any, kind: str):
    messages = question("wav" if kind == "url" else kind)
    if kind == "url":  # vLLM's form
        kind = "wav"
        url = f"data:audio/wav;base64,{b64encode(sound()).decode()}"
        messages[0]["content"][0] = {"type": "audio_url", "audio_url": {"url": url}}
    answer = client.chat.completions.create(
        model="omni_speech", messages=messages, extra_body={"stages": SHORT}
    )
    expected = in_python(media, "omni_speech", spoken_request(kind)).stages["thinker"]
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.audio is None


@pytest.mark.parametrize(
    ("voice", "kind"), [("Chelsie", "wav"), ("Ethan", "flac"), ("Ethan", "aac")]
)
def test_an_answer_is_spoken(media: LiveServer, client: Any, voice: str, kind: str):
    answer = client.chat.completions.create(
        model="omni_speech",
        messages=question(),
        modalities=["text", "audio"],
        audio={"voice": voice, "format": kind},
        extra_body={"stages": SHORT},
    )
    expected = in_python(media, "omni_speech", spoken_request(speaker=voice)).stages
    said = answer.choices[0].message
    assert said.content == said.audio.transcript == expected["thinker"].text
    samples = np.frombuffer(expected["code2wav"].audio.encoded("pcm16"), "<i2")
    content = b64decode(said.audio.data)
    assert said.audio.sampling_rate == 24_000
    if kind == "aac":
        assert decoded_by_ffmpeg(content)[0].size == pytest.approx(len(samples), abs=2400)
        return
    # Windows depend on the arrival of chunks, up to rounding.
    assert np.abs(heard(content).astype(int) - samples).max() <= 1
    assert said.audio.expires_at > answer.created
    check_forms_of_earlier_answer(client, said.content, said.model_dump(), said.audio.id)


def check_forms_of_earlier_answer(
    client: Any, content: str, as_it_came: Any, audio_id: str
) -> None:
    """Check that the next answer does not depend on the form of the earlier one."""
    earlier: Any = [
        {"content": content},
        as_it_came,
        {"audio": {"id": audio_id}},
        {"content": "", "audio": {"id": audio_id}},
        {"audio": {"id": "of another server", "transcript": content}},
    ]
    answers = {
        client.chat.completions.create(
            model="omni_speech",
            messages=[
                *question(),
                {"role": "assistant"} | each,
                {"role": "user", "content": "And then?"},
            ],
            extra_body={"stages": SHORT},
        )
        .choices[0]
        .message.content
        for each in earlier
    }
    assert len(answers) == 1


def test_a_streamed_answer_has_sound_while_it_is_generated(media: LiveServer, client: Any):
    stream = client.chat.completions.create(
        model="omni_speech",
        messages=question(),
        modalities=["text", "audio"],
        audio={"voice": "Ethan", "format": "pcm16"},
        stream=True,
        extra_body={"stages": {"thinker": {"max_tokens": 16}, "talker": {"max_tokens": 48}}},
    )
    text = transcript = ""
    audio: dict[str, Any] = {}
    pieces: list[bytes] = []
    reasons: list[str] = []
    for chunk in stream:
        (choice,) = chunk.choices
        assert not reasons, "the end comes last"
        text += choice.delta.content or ""
        audio = choice.delta.model_dump().get("audio") or {}
        transcript += audio.get("transcript") or ""
        if audio.get("data"):
            pieces.append(b64decode(audio["data"]))
        if choice.finish_reason is not None:
            reasons.append(choice.finish_reason)
    assert len(pieces) > 1 and reasons == ["length"]
    assert audio["expires_at"] > chunk.created
    check_forms_of_earlier_answer(client, text, {"audio": audio}, audio["id"])
    sampling = {"thinker": {"max_tokens": 16}, "talker": {"max_tokens": 48}}
    request = OmniRequest(spoken_request().prompt, sampling=sampling, speaker="Ethan")
    expected = in_python(media, "omni_speech", request).stages
    assert text == transcript == expected["thinker"].text
    samples = np.frombuffer(expected["code2wav"].audio.encoded("pcm16"), "<i2").astype(int)
    assert np.abs(np.frombuffer(b"".join(pieces), "<i2") - samples).max() <= 1


SPEECH = {"model": "omni_speech", "input": "Tell me about the tides."}


def decoded_by_ffmpeg(content: bytes) -> tuple[np.ndarray, int]:
    with av.open(io.BytesIO(content)) as file:
        frames = [frame.to_ndarray()[0] for frame in file.decode(audio=0)]
        return np.concatenate(frames), file.streams.audio[0].rate


TYPES = {
    "wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "opus": "audio/ogg",
    "aac": "audio/aac", "pcm": "audio/pcm",
}  # fmt: skip


@pytest.mark.parametrize("kind", [None, *TYPES])
def test_speech_is_a_file_of_the_requested_format(media: LiveServer, client: Any, kind: str | None):
    given = {} if kind is None else {"response_format": kind}
    with client.audio.speech.with_streaming_response.create(
        **SPEECH, voice={"id": "Ethan"}, **given
    ) as response:
        content = response.read()
    kind = kind or "mp3"
    assert response.headers["content-type"] == TYPES[kind]
    prompt = ChatPrompt(({"role": "user", "content": "Tell me about the tides."},))
    expected = in_python(media, "omni_speech", OmniRequest(prompt, speaker="Ethan"))
    whole = expected.stages["code2wav"].audio
    samples = np.frombuffer(whole.encoded("pcm16"), "<i2").astype(int)
    if kind in ("mp3", "opus", "aac"):
        lossy, rate = decoded_by_ffmpeg(content)
        assert lossy.size / rate == pytest.approx(len(samples) / 24_000, abs=0.1)
        assert np.abs(lossy).max() == pytest.approx(np.abs(samples / 2**15).max(), rel=0.5)
        return
    found = np.frombuffer(content, "<i2") if kind == "pcm" else heard(content)
    assert np.abs(found - samples).max() <= 1


@pytest.mark.parametrize("kind", ["mp3", "pcm"])
def test_speech_may_be_streamed_as_events(client: Any, kind: str):
    asked = {**SPEECH, "voice": "Ethan", "response_format": kind}
    whole = client.audio.speech.create(**asked).content
    events = []
    with client.audio.speech.with_streaming_response.create(
        **asked, stream_format="sse"
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                events.append(json.loads(line.removeprefix("data: ")))
    *deltas, last = events
    assert {each["type"] for each in deltas} == {"speech.audio.delta"} and len(deltas) > 1
    found = b"".join(b64decode(each["audio"]) for each in deltas)
    if kind == "pcm":  # windows depend on the arrival of chunks, up to rounding
        both = [np.frombuffer(each, "<i2").astype(int) for each in (found, whole)]
        assert np.abs(both[0] - both[1]).max() <= 1
    else:
        assert len(found) == pytest.approx(len(whole), rel=0.05)
    usage = last.pop("usage")
    assert last == {"type": "speech.audio.done"}
    assert usage["input_tokens"] > 0 and usage["output_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_speed_changes_the_length_of_speech(client: Any):
    speed = 1.5
    asked = {**SPEECH, "voice": "Ethan", "response_format": "pcm"}
    plain, changed = (
        client.audio.speech.create(**asked, speed=each).content for each in (1.0, speed)
    )
    assert len(changed) / 48_000 == pytest.approx(len(plain) / 48_000 / speed, abs=0.1)
    for wrong in (0.2, 4.5):
        with pytest.raises(openai.BadRequestError, match="speed"):
            client.audio.speech.create(**asked, speed=wrong)


def test_openais_voice_names_are_aliases_of_voices(media: LiveServer, client: Any):
    asked = {"model": "omni_speech", "input": "Tell me.", "response_format": "pcm"}
    more = {"stages": {"thinker": {"max_tokens": 6}, "talker": {"max_tokens": 20}}}
    alloy, ash, chelsie, ethan = (
        client.audio.speech.create(voice=voice, extra_body=more, **asked).read()
        for voice in ("alloy", "ash", "Chelsie", "Ethan")
    )
    assert alloy == chelsie != ethan == ash
    listed = json.loads(call(f"{media.url}/v1/audio/voices?model=omni_speech")[2])["voices"]
    assert [(each["id"], each["name"]) for each in listed] == [
        ("Chelsie", "Chelsie"), ("Ethan", "Ethan"),
    ]  # fmt: skip
    assert listed[0]["aliases"][0] == "alloy" and listed[1]["aliases"][0] == "ash"
    everywhere = json.loads(call(f"{media.url}/v1/audio/voices")[2])["voices"]
    assert {each["model"] for each in everywhere} == {"omni_speech", "silent"}
    assert call(f"{media.url}/v1/audio/voices?model=none")[0] == 404


def test_models_list_their_modalities_voices_and_stages(client: Any):
    models = {each.id: each.model_dump() for each in client.models.list()}
    expected: dict[str, tuple[list[str], list[str], list[str]]] = {
        "omni_speech": (
            ["text", "image", "audio", "video"],
            ["text", "audio"],
            ["Chelsie", "Ethan"],
        ),
        "seeing": (["text", "image"], ["text"], []),
        "transcribe_then_summarize": (["audio"], ["text"], []),
        "encode_then_generate": (["text"], ["tensors", "text"], []),
    }
    for name, (read, made, voices) in expected.items():
        assert models[name]["modalities"] == {"input": read, "output": made}, name
        assert models[name]["voices"] == voices and models[name]["examples"] == []
        assert models[name]["max_model_len"] > 0
    assert client.models.retrieve("omni_speech").model_dump() == models["omni_speech"]
    assert models["omni_speech"]["stages"] == [
        {"name": "thinker", "kind": "autoregressive"},
        {"name": "talker", "kind": "autoregressive"},
        {"name": "code2wav", "kind": "generator"},
    ]


def test_speech_has_sampling_parameters_by_stage(media: LiveServer, client: Any):
    asked = {"model": "omni_speech", "input": "Tell me.", "voice": "Ethan"}
    sampling = {"thinker": {"max_tokens": 6}, "talker": {"max_tokens": 20, "seed": 3}}
    more = {"stages": sampling, "priority": 1, "cache_salt": "mine"}
    content = client.audio.speech.create(**asked, response_format="pcm", extra_body=more).read()
    prompt = ChatPrompt(({"role": "user", "content": "Tell me."},))
    expected = in_python(
        media, "omni_speech", OmniRequest(prompt, sampling=sampling, speaker="Ethan")
    )
    samples = np.frombuffer(expected.stages["code2wav"].audio.encoded("pcm16"), "<i2")
    assert np.abs(np.frombuffer(content, "<i2").astype(int) - samples).max() <= 1
    with pytest.raises(openai.BadRequestError) as error:
        client.audio.speech.create(**asked, extra_body={"stages": {"talker": {"seed": -1}}})
    assert error.value.param == "stages.talker.seed"


@pytest.mark.parametrize("kind", ["wav", "mp3", "flac", "pcm"])
def test_speech_without_sound_is_an_error(media: LiveServer, client: Any, kind: str):
    with pytest.raises(openai.UnprocessableEntityError, match="the model made no sound"):
        client.audio.speech.create(
            model="silent", input="Say nothing.", voice="Ethan", response_format=kind
        )


def test_a_chat_without_sound_has_its_text(media: LiveServer, client: Any):
    spoken: dict[str, Any] = {"modalities": ["text", "audio"]}
    asked: dict[str, Any] = {"model": "silent", "messages": question()}
    whole = client.chat.completions.create(**asked, **spoken, audio={"format": "mp3"})
    streamed = client.chat.completions.create(
        **asked, **spoken, audio={"format": "pcm16"}, stream=True
    )
    deltas = [choice.delta for chunk in streamed for choice in chunk.choices]
    assert whole.choices[0].message.content == "".join(each.content or "" for each in deltas)
    assert whole.choices[0].message.content
    assert whole.choices[0].message.audio is None
    assert not any("data" in (getattr(each, "audio", None) or {}) for each in deltas)


@pytest.mark.parametrize(
    ("call", "wrong", "param", "message"),
    [
        ("chat", {"data": "!!!", "format": "wav"}, "input_audio.data", "not valid base64"),
        ("chat", {"data": "", "format": "wav"}, "input_audio.data", "must not be empty"),
        ("chat", {"data": "aGVsbG8=", "format": "aiff"}, "input_audio.format", "should be"),
        ("image", "/etc/passwd", "image_url.url", "must be a data URL"),
        ("image", "file:///etc/passwd", "image_url.url", "must be a data URL"),
        ("image", "data:image/png,raw", "image_url.url", "must begin like"),
        ("image", "https://images.example/a.png", "image_url.url", "--allow-url-hosts"),
    ],
)
def test_an_unreadable_part_is_reported_with_its_position(
    client: Any, call: str, wrong: Any, param: str, message: str
):
    part = {"type": "input_audio", "input_audio": wrong}
    if call == "image":
        part = {"type": "image_url", "image_url": {"url": wrong}}
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model="omni_speech", messages=[{"role": "user", "content": [part]}]
        )
    assert error.value.param == f"messages[0].content[0].{param}"
    assert message in error.value.message


@pytest.mark.parametrize("content", [b"hello", b"RIFF0000WAVE", picture()])
def test_an_undecodable_sound_is_refused(client: Any, content: bytes):
    audio = {"data": b64encode(content).decode(), "format": "wav"}
    with pytest.raises(openai.BadRequestError, match="the audio") as error:
        client.chat.completions.create(
            model="omni_speech",
            messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": audio}]}],
        )
    assert error.value.param == "messages"


def test_unsupported_requests_are_refused_with_the_reason(client: Any):
    create = client.chat.completions.create
    hello = [{"role": "user", "content": "hello"}]
    spoken = {"modalities": ["text", "audio"], "messages": hello}
    with pytest.raises(openai.BadRequestError, match="modalities: this model does not speak"):
        create(model="seeing", audio={"voice": "a", "format": "wav"}, **spoken)
    with pytest.raises(openai.BadRequestError, match="audio.voice: .*did you mean 'Ethan'"):
        create(model="omni_speech", audio={"voice": "Ethen", "format": "wav"}, **spoken)
    with pytest.raises(openai.BadRequestError, match="a stream sounds as pcm16, got 'wav'"):
        create(model="omni_speech", audio={"format": "wav"}, stream=True, **spoken)
    with pytest.raises(openai.BadRequestError, match="gives the tensor 'pooled'"):
        client.embeddings.create(model="seeing", input="x")
    with pytest.raises(openai.BadRequestError, match="model: this model does not speak"):
        client.audio.speech.create(model="seeing", input="x", voice="a")
    with pytest.raises(openai.BadRequestError, match="ref_audio: .*voices of its own only"):
        recorded = {"ref_audio": f"data:audio/wav;base64,{b64encode(sound()).decode()}"}
        client.audio.speech.create(
            model="omni_speech", input="x", voice="alloy", extra_body=recorded
        )
    with pytest.raises(openai.BadRequestError, match="gives text"):
        client.audio.transcriptions.create(model="encode_then_generate", file=("a.wav", sound()))
    with pytest.raises(openai.BadRequestError, match="file: it is empty"):
        client.audio.transcriptions.create(model="transcribe_then_summarize", file=("a.wav", b""))


def test_a_stage_without_named_voices_speaks():
    asked = {"model": "fake_speech", "input": "Hello.", "response_format": "wav"}
    with LiveServer([fake_speech({"kind": "inline"})]) as server:
        create = server.client().audio.speech.create
        one, other = (create(**asked, voice=each).read() for each in ("alloy", "verse"))
    samples, _ = soundfile.read(io.BytesIO(one))
    assert len(samples) and one == other


def test_a_recording_is_the_voice_with_or_without_its_text():
    """CSM continues a conversation; Pocket TTS has a voice before the text."""
    heard = b64encode(sound(seconds=0.5)).decode()
    asked = {"input": "Say this.", "voice": "alloy", "response_format": "pcm"}
    text, words = ({"type": "text", "text": each} for each in ("Say this.", "It was said."))
    spoken = {"type": "audio"}
    after = ({"role": "user", "content": [words, spoken]}, {"role": "user", "content": "Say this."})
    alone = ({"role": "user", "content": [spoken, text]},)
    with LiveServer(["csm_seeded", "pocket_tts_seeded"]) as server:
        create = server.client().audio.speech.create
        for model, said, messages in (
            ("csm_seeded", {"ref_text": "It was said."}, after),
            ("pocket_tts_seeded", {}, alone),
        ):
            more = {"ref_audio": f"data:audio/wav;base64,{heard}", **said}
            content = create(**asked, model=model, extra_body=more).read()
            prompt = ChatPrompt(messages, multi_modal_data={"audio": [b64decode(heard)]})
            expected = in_python(server, model, OmniRequest(prompt)).stages["codec"].audio
            samples = np.frombuffer(expected.encoded("pcm16"), "<i2").astype(int)
            assert np.abs(np.frombuffer(content, "<i2") - samples).max() <= 1
            assert content != create(**asked, model=model).read()
        for wrong, param in (
            ({"ref_text": "x"}, "ref_text"),
            ({"ref_audio": "/etc/passwd"}, "ref_audio"),
            ({"ref_audio": "data:audio/wav;base64,?"}, "ref_audio"),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                create(**asked, model="csm_seeded", extra_body=wrong)
            assert error.value.param == param
        with pytest.raises(openai.BadRequestError, match="WAV"):
            bad = {"ref_audio": f"data:audio/wav;base64,{b64encode(b'no sound').decode()}"}
            create(**asked, model="pocket_tts_seeded", extra_body=bad)
        server.check_nothing_is_left()


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_a_recorded_voice_may_have_a_name(tmp_path: Path, runtime: str):
    """It sounds like the same recording sent with the request."""
    (tmp_path / "ada.wav").write_bytes(heard := sound(seconds=0.5))
    csm, pocket = (
        PipelineConfig.load(
            model,
            {
                "voices": {"Ada": {"audio": str(tmp_path / "ada.wav")} | words},
                "runtime.kind": runtime,
            },
        )
        for model, words in (("csm_seeded", {"text": "It was said."}), ("pocket_tts_seeded", {}))
    )
    asked = {"input": "Say this.", "response_format": "pcm"}
    with LiveServer([csm, pocket.model_copy(update={"speaker": "Ada"})]) as server:
        create = server.client().audio.speech.create
        for model, said in (
            ("csm_seeded", {"ref_text": "It was said."}),
            ("pocket_tts_seeded", {}),
        ):
            more = {"ref_audio": f"data:audio/wav;base64,{b64encode(heard).decode()}"} | said
            given = create(**asked, model=model, voice="alloy", extra_body=more).read()
            named = create(**asked, model=model, voice="Ada").read()
            assert named == given == create(**asked, model=model, voice="alloy").read()
        assert create(**asked, model="pocket_tts_seeded", voice=openai.omit).read() == given
        listed = json.loads(call(f"{server.url}/v1/audio/voices")[2])["voices"]
        assert [(each["id"], each["model"]) for each in listed] == [
            ("Ada", "csm_seeded"),
            ("Ada", "pocket_tts_seeded"),
        ]
        with pytest.raises(openai.BadRequestError, match="voice: .*'Adda': .*did you mean 'Ada'"):
            create(**asked, model="csm_seeded", voice="Adda")
        server.check_nothing_is_left()
