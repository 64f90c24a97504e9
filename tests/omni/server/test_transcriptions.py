"""Transcriptions and translations equal those of ``Omni`` in Python."""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any
from urllib.parse import urlencode

import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from engine import TranscriptionOptions
from omni import AudioPrompt, OmniRequest, SamplingParams
from omni.server.openai.transcription import (
    TIMESTAMP,
    TranscriptionRequest,
    _format_time,
    _WordReader,
    read_transcription,
)
from omni.server.serving.api_error import ApiError
from tests.support.live_server import LiveServer
from tests.support.media_requests import in_python, sound
from tests.support.one_writer import one_writer

NAME = "transcribe_then_summarize"


def asked(seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    """Fields of a request to transcribe a tone."""
    return {"model": NAME, "file": ("speech.wav", sound(seconds=seconds))} | more


def expected_of(server: LiveServer, prompt: AudioPrompt, **more: Any) -> Any:
    """The output of the transcriber in Python."""
    return in_python(server, NAME, OmniRequest(prompt, **more)).stages["transcriber"]


@pytest.fixture(scope="module")
def hearing(checkpoint_cache: object) -> Iterator[LiveServer]:
    with LiveServer([NAME]) as server:
        yield server
        server.check_nothing_is_left()


@pytest.fixture(scope="module")
def client(hearing: LiveServer) -> Any:
    return hearing.client()


@pytest.mark.parametrize("kind", ["json", "text", "verbose_json"])
def test_speech_is_transcribed(hearing: LiveServer, client: Any, kind: str):
    answer = client.audio.transcriptions.create(**asked(language="en", response_format=kind))
    prompt = AudioPrompt(sound(seconds=1.0), language="en", task="transcribe")
    text = expected_of(hearing, prompt).text
    if kind == "text":
        assert answer == f"{text}\n"
    elif kind == "json":
        assert answer.text == text
    else:
        assert answer.task == "transcribe" and answer.language == "en"
        times = [time for each in answer.segments for time in (each.start, each.end)]
        assert times == list(accumulate(times, max)), "segments follow each other"
        assert "<|" not in answer.text


def test_segments_have_confidence_figures(hearing: LiveServer, client: Any):
    answer = client.audio.transcriptions.create(**asked(response_format="verbose_json"))
    sampling = {"transcriber": SamplingParams(temperature=0.0, max_tokens=32, logprobs=0)}
    prompt = AudioPrompt(sound(seconds=1.0), timestamps=True)
    output = expected_of(hearing, prompt, sampling=sampling)
    mean = float(np.mean([each.logprob for each in output.logprobs]))
    for segment in answer.segments:
        assert segment.avg_logprob == pytest.approx(mean, abs=1e-3)
        assert segment.no_speech_prob > 0.9, "it is a tone"
        whole = TIMESTAMP.sub("", output.text).encode()
        assert segment.compression_ratio == pytest.approx(len(whole) / len(zlib.compress(whole)))
    finely: Any = {"type": "server_vad", "threshold": 0.4}
    for wish in (
        {"chunking_strategy": "auto"},
        {"chunking_strategy": finely},
        {"extra_body": {"vad": "true"}},
        {"extra_body": {"chunking_strategy": json.dumps(finely)}},
    ):
        assert client.audio.transcriptions.create(**asked(**wish)).text == ""


@pytest.mark.parametrize("kind", ["srt", "vtt"])
def test_subtitles_have_the_segments_and_their_times(client: Any, kind: str):
    create = client.audio.transcriptions.create
    segments = create(**asked(response_format="verbose_json")).segments
    text = create(**asked(response_format=kind))
    cues = text.rstrip("\n").split("\n\n")
    if kind == "vtt":
        assert cues.pop(0) == "WEBVTT"
    assert len(cues) == len(segments) > 0
    point = "," if kind == "srt" else "."
    for number, (cue, segment) in enumerate(zip(cues, segments, strict=True), 1):
        *first, times, words = cue.split("\n")
        assert first == ([str(number)] if kind == "srt" else [])
        for shown, seconds in zip(times.split(" --> "), (segment.start, segment.end), strict=True):
            hours, minutes, rest = shown.replace(point, ".").split(":")
            assert int(hours) * 3600 + int(minutes) * 60 + float(rest) == pytest.approx(seconds)
        assert words == " ".join(segment.text.split())


def test_times_are_formatted_with_hours():
    assert (
        _format_time(3723.4567, ",") == "01:02:03,457"
        and _format_time(0.9996, ".") == "00:00:01.000"
    )


def test_a_transcription_is_streamed(client: Any):
    create = client.audio.transcriptions.create
    whole = create(**asked())
    *deltas, done = create(**asked(stream=True))
    assert {each.type for each in deltas} == {"transcript.text.delta"}
    assert "".join(each.delta for each in deltas) == whole.text == done.text
    assert done.type == "transcript.text.done" and len(deltas) > 1
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    assert done.usage.output_tokens >= len(deltas)
    cut = create(**asked(extra_body={"max_completion_tokens": 3, "hotwords": "tide"}))
    assert len(cut.text) < len(whole.text)
    body = {"priority": "1", "max_repeats": "2", "repetition_penalty": "1.5"}
    assert create(**asked(extra_body=body)).text != whole.text
    with pytest.raises(openai.BadRequestError, match="to_language: not supported"):
        create(**asked(extra_body={"to_language": "fr"}))
    with pytest.raises(openai.BadRequestError, match="goes with json and text, not with srt"):
        create(**asked(stream=True, response_format="srt"))


@pytest.fixture(scope="module")
def heard(checkpoint_cache: object) -> Iterator[LiveServer]:
    """A decoder for speech; its grammar writes a language first, unlike seeded weights."""
    headed = {"grammar": 'start: "language English" <asr_text> /[a-z ]{8,16}/'}
    sampling = {"temperature": 0.0, "max_tokens": 48, "structured_output": headed}
    with LiveServer([one_writer("ears", model="seeded:qwen3_asr", sampling=sampling)]) as server:
        yield server
        server.check_nothing_is_left()


def test_a_decoders_transcription_has_only_its_words(heard: LiveServer) -> None:
    output = in_python(heard, "ears", OmniRequest(AudioPrompt(sound(seconds=1.0))))
    written = output.stages["writer"].text
    heading, tag, words = written.partition("<asr_text>")
    assert heading.startswith("language ") and tag and words
    create: Any = heard.client().audio.transcriptions.create
    assert create(**asked(model="ears")).text == words
    *deltas, done = create(**asked(model="ears", stream=True))
    assert "".join(each.delta for each in deltas) == done.text == words and len(deltas) > 1
    with pytest.raises(openai.BadRequestError, match="timestamps is for speech models"):
        create(**asked(model="ears", response_format="srt"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("language English<asr_text>It was<|0.50|> cold.", "It was cold."),
        ("language None<asr_text>", ""),
        ("language barriers are high", "language barriers are high"),
        (" lang", "lang"),
        ("language " * 20 + "<asr_text>", "language " * 20 + "<asr_text>"),
        ("", ""),
    ],
)
@given(data=st.data())
def test_words_are_the_same_however_their_text_is_split(
    text: str, words: str, data: st.DataObject
) -> None:
    pieces = re.findall(r"<\|.*?\|>|.", text)  # a time is one token
    places = sorted(data.draw(st.sets(st.integers(0, len(pieces)))) | {0, len(pieces)})
    reader = _WordReader()
    read = ["".join(pieces[a:b]) for a, b in pairwise(places)]
    assert "".join([*map(reader.read, read), reader.read("", is_last=True)]) == words


def test_the_detected_language_is_returned(hearing: LiveServer, client: Any):
    answer = client.audio.transcriptions.create(**asked(response_format="verbose_json"))
    expected = expected_of(hearing, AudioPrompt(sound(seconds=1.0), timestamps=True))
    tokenizer: Any = hearing.pipelines.find(NAME).tokenizers["transcriber"]
    assert answer.language in ("de", "en", "zh"), "the languages of the checkpoint"
    token = tokenizer.convert_tokens_to_ids(f"<|{answer.language}|>")
    assert expected.prompt_token_ids[1] == token


def test_a_long_recording_has_segments_throughout(hearing: LiveServer, client: Any):
    wishes = {"response_format": "verbose_json", "timestamp_granularities": ["segment"]}
    answer = client.audio.transcriptions.create(**asked(7.0, language="en", **wishes))
    prompt = AudioPrompt(sound(seconds=7.0), language="en", timestamps=True)
    windows = expected_of(hearing, prompt).windows
    assert answer.duration == 7.0 and len(windows) > 2
    assert {each.seek for each in answer.segments} <= {
        round(100 * each.begin_s) for each in windows
    }
    times = [time for each in answer.segments for time in (each.start, each.end)]
    assert times == list(accumulate(times, max))
    assert times[-1] > 4.0, "beyond the second window"
    assert "".join(each.text for each in answer.segments) == answer.text


def test_words_have_the_times_of_python(hearing: LiveServer, client: Any):
    """Further options have the names of transformers."""
    limits: dict[str, Any] = {
        "compression_ratio_threshold": 1.1, "logprob_threshold": -3.0, "no_speech_threshold": 0.9,
    }  # fmt: skip
    fields = asked(3.0, language="en", response_format="verbose_json", prompt="the rain")
    answer = client.audio.transcriptions.create(
        **fields,
        timestamp_granularities=["word", "segment"],
        extra_body=limits | {"temperature": [0.0, 0.0001]},
    )
    options = TranscriptionOptions(
        **limits, prompt="the rain", temperature=(0.0, 0.0001), return_token_timestamps=True
    )
    prompt = AudioPrompt(sound(seconds=3.0), language="en", timestamps=True, transcription=options)
    windows = expected_of(hearing, prompt).windows
    reported = [(each.word.strip(), each.start, each.end) for w in windows for each in w.words]
    assert [(each.word, each.start, each.end) for each in answer.words] == reported and len(
        reported
    ) > 3
    assert {each.temperature for each in answer.segments} <= {w.temperature for w in windows}
    silence = [each.no_speech_prob for each in answer.segments]
    known = [w.no_speech_prob for w in windows]
    assert all(min(abs(each - one) for one in known) < 1e-6 for each in silence)


def test_segments_work_with_stages_in_processes(checkpoint_cache: object):
    config = one_writer("ears", model="seeded:whisper", runtime={"kind": "processes"})
    with LiveServer([config]) as server, server.client() as client:
        create: Any = client.audio.transcriptions.create
        written = create(**asked(model="ears", response_format="verbose_json"))
        assert written.segments is not None and len(written.language) == 2


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client's own method
def test_speech_is_translated(hearing: LiveServer, client: Any):
    answer = client.audio.translations.create(model=NAME, file=("speech.mp3", sound("mp3")))
    expected = expected_of(hearing, AudioPrompt(sound("mp3"), task="translate"))
    assert answer.text == expected.text


_BOUNDARY = "a-line-of-no-field"


def read(*fields: tuple[str, str], num_files: int = 1) -> tuple[TranscriptionRequest, bytes]:
    """Read a form of these fields, in this order, after the files."""
    parts = [
        f'Content-Disposition: form-data; name="file"; filename="{number}.wav"\r\n\r\nsound'
        for number in range(num_files)
    ]
    parts += [
        f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}' for name, value in fields
    ]
    body = "".join(f"--{_BOUNDARY}\r\n{part}\r\n" for part in parts) + f"--{_BOUNDARY}--\r\n"
    return asyncio.run(
        read_transcription(posted(body, f"multipart/form-data; boundary={_BOUNDARY}"))
    )


def posted(body: str, kind: str) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body.encode(), "more_body": False}

    headers = [(b"content-type", kind.encode())]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


MODEL = ("model", "a")
WORDS = ("timestamp_granularities[]", "word")
SEGMENTS = ("timestamp_granularities[]", "segment")


def test_fields_are_read_and_segments_may_be_requested() -> None:
    body, content = read(MODEL, ("language", "en"), ("temperature", "0.5"))
    assert (body.model, body.language, body.temperature) == ("a", "en", (0.5,))
    assert content == b"sound"
    for wished in ((SEGMENTS,), (SEGMENTS, SEGMENTS)):
        assert read(MODEL, *wished)[0].model == "a"


def test_words_need_verbose_json() -> None:
    with pytest.raises(ApiError, match="word goes with verbose_json, not with json") as error:
        read(MODEL, SEGMENTS, WORDS)
    assert error.value.status == 400 and error.value.param == "timestamp_granularities"
    both = read(MODEL, SEGMENTS, WORDS, ("response_format", "verbose_json"))[0]
    assert both.wants_words and both.timestamp_granularities == ("segment", "word")


def test_fields_become_options_of_the_prompt() -> None:
    assert read(MODEL, ("temperature", "0"), SEGMENTS)[0].options is None
    fields = ("prompt", "Ada"), ("temperature[]", "0"), ("temperature[]", "0.4")
    assert read(MODEL, ("prompt", ""))[0].options is None
    body = read(MODEL, *fields, ("condition_on_prev_tokens", "true"), ("seed", "7"))[0]
    assert body.seed == 7
    assert body.options == TranscriptionOptions(
        prompt="Ada", temperature=(0.0, 0.4), condition_on_prev_tokens=True
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "b"), ("language", "de"), ("response_format", "text"), ("temperature", "1")],
)
def test_a_field_that_is_given_twice_is_refused(name: str, value: str) -> None:
    with pytest.raises(ApiError, match=f"{name}: given 2 times; give it once") as error:
        once = ("language", "en"), ("response_format", "json"), ("temperature", "0")
        read(MODEL, *once, (name, value))
    assert error.value.status == 400 and error.value.param == name


def test_a_second_file_is_refused() -> None:
    with pytest.raises(ApiError, match="file: given 2 times; give it once") as error:
        read(MODEL, num_files=2)
    assert error.value.status == 400 and error.value.param == "file"
    # A text field after the file must not replace it.
    with pytest.raises(ApiError, match="file: given 2 times; give it once") as error:
        read(MODEL, ("file", "text"))
    assert error.value.param == "file"


def test_a_form_without_a_file_is_refused() -> None:
    for body in ((), (("file", "text"),)):
        with pytest.raises(ApiError, match="file: missing; it must be given as a file"):
            read(MODEL, *body, num_files=0)
    kind = "application/x-www-form-urlencoded"
    with pytest.raises(ApiError, match="file: missing"):
        asyncio.run(read_transcription(posted(urlencode([MODEL]), kind)))
