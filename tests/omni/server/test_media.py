"""Images and sound in, sound and rows out, as Omni gives them in Python."""

from __future__ import annotations

import io
import json
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from PIL import Image

from omni import AudioPrompt, ChatPrompt, OmniRequest, TextPrompt
from omni.pipelines.pipeline_config import PipelineConfig
from omni.requests.request import OmniOutput
from omni.server.openai.spoken_sound import TRANSCRIPT_GAP_S
from omni.server.serving.live_response import DONE, LastPiece, LiveStream
from tests.support.encoder_decoder_requests import SAMPLING_RATE, tone
from tests.support.live_server import LiveServer
from tests.support.patience import PATIENCE_S
from tests.support.text_gaps import note_text_gaps

MODEL = {"model": "omni_speech"}
SHORT = {"thinker": {"max_tokens": 8}, "talker": {"max_tokens": 16}}


def silent() -> PipelineConfig:
    """A pipeline that speaks, whose talker ends with whatever it says first."""
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
    names = ["omni_speech", "transcribe_then_summarize", "encode_then_generate", seeing, silent()]
    with LiveServer(names) as server:
        yield server


@pytest.fixture(scope="module")
def client(media: LiveServer) -> Any:
    return media.client()


def sound(kind: str = "wav", seconds: float = 0.5) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, tone(seconds), SAMPLING_RATE, format=kind.upper())
    return file.getvalue()


def picture() -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (40, 30, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def in_python(server: LiveServer, name: str, request: OmniRequest) -> OmniOutput:
    (output,) = server.omni(name).generate([request])
    assert output.error is None, output.error
    return output


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


def test_an_image_is_seen(media: LiveServer, client: Any):
    url = f"data:image/png;base64,{b64encode(picture()).decode()}"
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
        {"type": "text", "text": "What is this?"},
    ]
    answer = client.chat.completions.create(
        model="seeing", messages=[{"role": "user", "content": parts}]
    )
    said = [{"type": "image"}, parts[1]]
    prompt = ChatPrompt(({"role": "user", "content": said},), {"image": [picture()]})
    expected = in_python(media, "seeing", OmniRequest(prompt)).stages["seer"]
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3"])
def test_sound_is_heard(media: LiveServer, client: Any, kind: str):
    answer = client.chat.completions.create(
        model="omni_speech", messages=question(kind), extra_body={"stages": SHORT}
    )
    expected = in_python(media, "omni_speech", spoken_request(kind)).stages["thinker"]
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.audio is None


@pytest.mark.parametrize(("voice", "kind"), [("Chelsie", "wav"), ("Ethan", "flac")])
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
    # Windows depend on when chunks came, by rounding.
    assert np.abs(heard(b64decode(said.audio.data)).astype(int) - samples).max() <= 1
    assert said.audio.sampling_rate == 24_000
    client.chat.completions.create(  # and goes on where it was sent back as it came
        model="omni_speech",
        messages=[*question(), said.model_dump(), {"role": "user", "content": "And then?"}],
        extra_body={"stages": SHORT},
    )


def test_a_streamed_answer_sounds_while_it_is_made(media: LiveServer, client: Any):
    stream = client.chat.completions.create(
        model="omni_speech",
        messages=question(),
        modalities=["text", "audio"],
        audio={"voice": "Ethan", "format": "pcm16"},
        stream=True,
        extra_body={"stages": {"thinker": {"max_tokens": 16}, "talker": {"max_tokens": 48}}},
    )
    text, transcript = "", ""
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
    sampling = {"thinker": {"max_tokens": 16}, "talker": {"max_tokens": 48}}
    request = OmniRequest(spoken_request().prompt, sampling=sampling, speaker="Ethan")
    expected = in_python(media, "omni_speech", request).stages
    assert text == transcript == expected["thinker"].text
    samples = np.frombuffer(expected["code2wav"].audio.encoded("pcm16"), "<i2").astype(int)
    assert np.abs(np.frombuffer(b"".join(pieces), "<i2") - samples).max() <= 1


@pytest.mark.parametrize("stream", [True, False])
def test_text_waits_for_more_beside_speech_alone(
    media: LiveServer, client: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    gaps = note_text_gaps(monkeypatch)
    audio = {"format": "pcm16" if stream else "wav"}
    for spoken in ({}, {"modalities": ["text", "audio"], "audio": audio}):
        answer = client.chat.completions.create(
            model="omni_speech",
            messages=question(),
            stream=stream,
            extra_body={"stages": SHORT},
            **spoken,
        )
        list(answer)
    assert gaps == [0.0, TRANSCRIPT_GAP_S]


@pytest.mark.parametrize("kind", ["wav", "mp3"])
def test_text_that_nobody_is_told_waits(
    media: LiveServer, client: Any, monkeypatch: pytest.MonkeyPatch, kind: str
):
    gaps = note_text_gaps(monkeypatch)
    client.audio.speech.create(
        model="omni_speech", input="Hello.", voice="Ethan", response_format=kind
    )
    assert gaps == [TRANSCRIPT_GAP_S]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", MODEL | {"messages": [{"role": "user", "content": "What?"}]}),
        ("/v1/completions", MODEL | {"prompt": "What?", "stream_options": {"include_usage": True}}),
        ("/v1/pipelines/omni_speech", {"prompt": "What?"}),
    ],
)
def test_the_last_event_is_sent_with_the_end(
    media: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
):
    pieces: list[bytes] = []

    async def noted(given: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in given:
            pieces.append(piece)
            yield piece

    begin = LiveStream.__init__

    def init(stream: LiveStream, given: AsyncIterator[bytes], *rest: Any) -> None:
        begin(stream, noted(given), *rest)

    monkeypatch.setattr(LiveStream, "__init__", init)
    request = urllib.request.Request(
        media.url + path,
        json.dumps({"stream": True, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert answer.read() == b"".join(pieces)
    assert [isinstance(piece, LastPiece) for piece in pieces] == [False] * (len(pieces) - 1) + [
        True
    ]
    assert pieces[-1].endswith(DONE) and len(pieces) > 1


@pytest.mark.parametrize("kind", ["wav", "mp3", "flac", "pcm"])
def test_speech_is_a_file_of_the_kind_that_was_asked_for(media: LiveServer, client: Any, kind: str):
    with client.audio.speech.with_streaming_response.create(
        model="omni_speech", input="Tell me about the tides.", voice="Ethan", response_format=kind
    ) as response:
        content = response.read()
    prompt = ChatPrompt(({"role": "user", "content": "Tell me about the tides."},))
    expected = in_python(media, "omni_speech", OmniRequest(prompt, speaker="Ethan"))
    whole = expected.stages["code2wav"].audio
    samples = np.frombuffer(whole.encoded("pcm16"), "<i2").astype(int)
    if kind == "mp3":
        assert abs(len(heard(content)) - len(samples)) < 2400, "it loses a little"
        return
    found = np.frombuffer(content, "<i2") if kind == "pcm" else heard(content)
    assert np.abs(found - samples).max() <= 1


def test_speech_is_sampled_by_stage_as_chats_are(media: LiveServer, client: Any):
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
def test_speech_that_is_silent_is_an_error(media: LiveServer, client: Any, kind: str):
    with pytest.raises(openai.InternalServerError, match="the model made no sound"):
        client.audio.speech.create(
            model="silent", input="Say nothing.", voice="Ethan", response_format=kind
        )


def test_a_chat_whose_model_stays_silent_is_its_text(media: LiveServer, client: Any):
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
    ("wrong", "param"),
    [
        ({"n": 2}, "n"),
        ({"stages": {"thinker": {"n": 2}}}, "stages.thinker.n"),
        ({"stages": {"talker": {"stop": ["."]}}}, "stages.talker.stop"),
        (
            {"stages": {"talker": {"suppress_token_ids": [9999]}}},
            "stages.talker.suppress_token_ids",
        ),
        ({"stages": {"code2wav": {"seed": 1}}}, "stages.code2wav.seed"),
    ],
)
def test_what_a_stage_of_a_voice_cannot_do_is_told_with_its_field(
    client: Any, wrong: dict[str, Any], param: str
):
    with pytest.raises(openai.BadRequestError, match=r"stage '|: the stage ") as error:
        client.chat.completions.create(
            **MODEL, messages=[{"role": "user", "content": "Say."}], extra_body=wrong
        )
    assert error.value.param == param


@pytest.mark.parametrize("kind", ["json", "text", "verbose_json"])
def test_speech_is_written_down(media: LiveServer, client: Any, kind: str):
    answer = client.audio.transcriptions.create(
        model="transcribe_then_summarize",
        file=("speech.wav", sound(seconds=1.0)),
        language="en",
        response_format=kind,
    )
    prompt = AudioPrompt(sound(seconds=1.0), language="en", task="transcribe")
    expected = in_python(media, "transcribe_then_summarize", OmniRequest(prompt))
    text = expected.stages["transcriber"].text
    if kind == "text":
        assert answer == f"{text}\n"
    elif kind == "json":
        assert answer.text == text
    else:
        assert answer.task == "transcribe" and answer.language == "en"
        times = [time for each in answer.segments for time in (each.start, each.end)]
        assert times == list(accumulate(times, max)), "segments follow each other"
        assert "<|" not in answer.text


def test_the_language_that_the_model_found_out_is_told(media: LiveServer, client: Any):
    name = "transcribe_then_summarize"
    answer = client.audio.transcriptions.create(
        model=name, file=("speech.wav", sound(seconds=1.0)), response_format="verbose_json"
    )
    prompt = AudioPrompt(sound(seconds=1.0), timestamps=True)
    expected = in_python(media, name, OmniRequest(prompt)).stages["transcriber"]
    tokenizer: Any = media.pipelines.find(name).tokenizer("transcriber")
    assert answer.language in ("de", "en", "zh"), "what the checkpoint knows"
    token = tokenizer.convert_tokens_to_ids(f"<|{answer.language}|>")
    assert expected.prompt_token_ids[1] == token


def test_a_long_recording_has_segments_from_its_begin_to_its_end(media: LiveServer, client: Any):
    answer = client.audio.transcriptions.create(
        model="transcribe_then_summarize",
        file=("speech.wav", sound(seconds=7.0)),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    prompt = AudioPrompt(sound(seconds=7.0), language="en", timestamps=True)
    expected = in_python(media, "transcribe_then_summarize", OmniRequest(prompt))
    windows = expected.stages["transcriber"].windows
    assert answer.duration == 7.0 and len(windows) > 2
    assert {each.seek for each in answer.segments} <= {
        round(100 * each.begin_s) for each in windows
    }
    times = [time for each in answer.segments for time in (each.start, each.end)]
    assert times == list(accumulate(times, max))
    assert times[-1] > 4.0, "beyond the second window"
    assert "".join(each.text for each in answer.segments) == answer.text


def test_times_of_words_are_refused(client: Any):
    with pytest.raises(openai.BadRequestError, match="timestamp_granularities"):
        client.audio.transcriptions.create(
            model="transcribe_then_summarize",
            file=("speech.wav", sound(seconds=1.0)),
            response_format="verbose_json",
            timestamp_granularities=["word"],
        )


@pytest.mark.parametrize("kind", ["processes"])
def test_what_needs_a_tokenizer_works_wherever_stages_run(checkpoint_cache: object, kind: str):
    config = PipelineConfig.load("transcribe_then_summarize", {"runtime.kind": kind})
    with LiveServer([config]) as server, server.client() as client:
        written = client.audio.transcriptions.create(
            model=config.name,
            file=("speech.wav", sound(seconds=1.0)),
            response_format="verbose_json",
        )
        assert written.segments is not None and len(written.language) == 2


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client's own method
def test_speech_is_translated(media: LiveServer, client: Any):
    answer = client.audio.translations.create(
        model="transcribe_then_summarize", file=("speech.mp3", sound("mp3"))
    )
    prompt = AudioPrompt(sound("mp3"), task="translate")
    expected = in_python(media, "transcribe_then_summarize", OmniRequest(prompt))
    assert answer.text == expected.stages["transcriber"].text


TEXTS = ["Once upon a time", "Twice", "Once upon a hill there was a house"]


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_embeddings_are_the_encoders_pooled_rows(media: LiveServer, client: Any, encoding: Any):
    given: dict[str, Any] = {} if encoding is None else {"encoding_format": encoding}
    given["extra_body"] = {"priority": 1, "cache_salt": "mine"}
    answer = client.embeddings.create(model="encode_then_generate", input=TEXTS, **given)
    outputs = media.omni("encode_then_generate").generate([TextPrompt(text) for text in TEXTS])
    for index, (found, output) in enumerate(zip(answer.data, outputs, strict=True)):
        row = found.embedding
        if isinstance(row, str):
            row = np.frombuffer(b64decode(row), "<f4")
        expected = output.stages["encoder"].tensors["pooled"]
        assert found.index == index
        np.testing.assert_allclose(row, expected.numpy(), atol=1e-5)
    tokens = sum(output.stages["encoder"].num_prompt_tokens for output in outputs)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens


def test_one_text_and_token_ids_have_embeddings_too(client: Any):
    for given in ("Once", [5, 6, 7], [[5, 6], [7]]):
        answer = client.embeddings.create(model="encode_then_generate", input=given)
        assert len(answer.data) == (2 if isinstance(given[0], list) else 1)


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
def test_a_part_that_cannot_be_read_is_told_with_its_place(
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
def test_a_sound_that_is_none_fails_alone(client: Any, content: bytes):
    audio = {"data": b64encode(content).decode(), "format": "wav"}
    with pytest.raises(openai.BadRequestError, match="the audio") as error:
        client.chat.completions.create(
            model="omni_speech",
            messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": audio}]}],
        )
    assert error.value.param == "messages"


def test_what_a_model_cannot_do_is_told(client: Any):
    create = client.chat.completions.create
    hello = [{"role": "user", "content": "hello"}]
    spoken = {"modalities": ["text", "audio"], "messages": hello}
    with pytest.raises(openai.BadRequestError, match="modalities: this model does not speak"):
        create(model="seeing", audio={"voice": "a", "format": "wav"}, **spoken)
    with pytest.raises(openai.BadRequestError, match="audio.voice: .*did you mean 'Ethan'"):
        create(model="omni_speech", audio={"voice": "Ethen", "format": "wav"}, **spoken)
    with pytest.raises(openai.BadRequestError, match="a stream sounds as pcm16, got 'wav'"):
        create(model="omni_speech", audio={"format": "wav"}, stream=True, **spoken)
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        client.embeddings.create(model="seeing", input="x")
    with pytest.raises(openai.BadRequestError, match="model: this model does not speak"):
        client.audio.speech.create(model="seeing", input="x", voice="a")
    with pytest.raises(openai.BadRequestError, match="writes nothing that it hears"):
        client.audio.transcriptions.create(model="encode_then_generate", file=("a.wav", sound()))
    with pytest.raises(openai.BadRequestError, match="prompt: not supported"):
        client.audio.transcriptions.create(
            model="transcribe_then_summarize", file=("a.wav", sound()), prompt="Hello"
        )
    with pytest.raises(openai.BadRequestError, match="file: it is empty"):
        client.audio.transcriptions.create(model="transcribe_then_summarize", file=("a.wav", b""))


def test_nothing_is_left_of_all_that(media: LiveServer, tmp_path: Path):
    media.check_nothing_is_left()
