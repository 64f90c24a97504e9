"""What is heard is written down, or translated, as ``Omni`` does it in Python."""

from __future__ import annotations

import asyncio
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
from omni.pipelines.pipeline_config import PipelineConfig
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


@pytest.fixture(scope="module")
def hearing(checkpoint_cache: object) -> Iterator[LiveServer]:
    with LiveServer(["transcribe_then_summarize"]) as server:
        yield server
        server.check_nothing_is_left()


@pytest.fixture(scope="module")
def client(hearing: LiveServer) -> Any:
    return hearing.client()


@pytest.mark.parametrize("kind", ["json", "text", "verbose_json"])
def test_speech_is_written_down(hearing: LiveServer, client: Any, kind: str):
    answer = client.audio.transcriptions.create(
        model="transcribe_then_summarize",
        file=("speech.wav", sound(seconds=1.0)),
        language="en",
        response_format=kind,
    )
    prompt = AudioPrompt(sound(seconds=1.0), language="en", task="transcribe")
    expected = in_python(hearing, "transcribe_then_summarize", OmniRequest(prompt))
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


def test_a_client_can_tell_what_to_trust(hearing: LiveServer, client: Any):
    asked = {"model": "transcribe_then_summarize", "file": ("a.wav", sound(seconds=1.0))}
    answer = client.audio.transcriptions.create(response_format="verbose_json", **asked)
    sampling = {"transcriber": SamplingParams(temperature=0.0, max_tokens=32, logprobs=0)}
    prompt = AudioPrompt(sound(seconds=1.0), timestamps=True)
    output = in_python(
        hearing, "transcribe_then_summarize", OmniRequest(prompt, sampling=sampling)
    ).stages["transcriber"]
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
    ):
        assert client.audio.transcriptions.create(**asked, **wish).text == ""


@pytest.mark.parametrize("kind", ["srt", "vtt"])
def test_subtitles_have_the_segments_and_their_times(client: Any, kind: str):
    asked = {"model": "transcribe_then_summarize", "file": ("a.wav", sound(seconds=1.0))}
    segments = client.audio.transcriptions.create(response_format="verbose_json", **asked).segments
    text = client.audio.transcriptions.create(response_format=kind, **asked)
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


def test_clocks_count_hours():
    assert (
        _format_time(3723.4567, ",") == "01:02:03,457"
        and _format_time(0.9996, ".") == "00:00:01.000"
    )


def test_a_transcription_is_streamed(client: Any):
    asked = {"model": "transcribe_then_summarize", "file": ("a.wav", sound(seconds=1.0))}
    whole = client.audio.transcriptions.create(**asked)
    *deltas, done = client.audio.transcriptions.create(stream=True, **asked)
    assert {each.type for each in deltas} == {"transcript.text.delta"}
    assert "".join(each.delta for each in deltas) == whole.text == done.text
    assert done.type == "transcript.text.done" and len(deltas) > 1
    with pytest.raises(openai.BadRequestError, match="goes with json and text, not with srt"):
        client.audio.transcriptions.create(stream=True, response_format="srt", **asked)


@pytest.fixture(scope="module")
def heard(checkpoint_cache: object) -> Iterator[LiveServer]:
    """A decoder that hears: it writes a language first, which seeded weights would not."""
    headed = {"grammar": 'start: "language English" <asr_text> /[a-z ]{8,16}/'}
    stage = {
        "kind": "autoregressive",
        "model": "seeded:qwen3_asr",
        "engine": {"num_blocks": 64, "block_size": 16, "device": "cpu"},
        "sampling": {"temperature": 0.0, "max_tokens": 48, "structured_output": headed},
        "final_output": "text",
    }
    config = {"name": "ears", "stages": {"hearer": stage}}
    with LiveServer([PipelineConfig.model_validate(config)]) as server:
        yield server
        server.check_nothing_is_left()


def test_of_what_a_decoder_heard_the_words_alone_are_told(heard: LiveServer) -> None:
    asked: dict[str, Any] = {"model": "ears", "file": ("a.wav", sound(seconds=1.0))}
    output = in_python(heard, "ears", OmniRequest(AudioPrompt(sound(seconds=1.0))))
    written = output.stages["hearer"].text
    heading, tag, words = written.partition("<asr_text>")
    assert heading.startswith("language ") and tag and words
    client = heard.client()
    whole = client.audio.transcriptions.create(**asked)
    assert whole.text == words
    *deltas, done = client.audio.transcriptions.create(stream=True, **asked)
    assert "".join(each.delta for each in deltas) == done.text == words and len(deltas) > 1
    with pytest.raises(openai.BadRequestError, match="timestamps is for speech models"):
        client.audio.transcriptions.create(response_format="srt", **asked)


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
def test_words_are_the_same_however_their_text_is_cut(
    text: str, words: str, data: st.DataObject
) -> None:
    pieces = re.findall(r"<\|.*?\|>|.", text)  # a time comes whole, as a token
    places = sorted(data.draw(st.sets(st.integers(0, len(pieces)))) | {0, len(pieces)})
    reader = _WordReader()
    read = ["".join(pieces[a:b]) for a, b in pairwise(places)]
    assert "".join([*map(reader.read, read), reader.read("", is_last=True)]) == words


def test_the_language_that_the_model_found_out_is_told(hearing: LiveServer, client: Any):
    name = "transcribe_then_summarize"
    answer = client.audio.transcriptions.create(
        model=name, file=("speech.wav", sound(seconds=1.0)), response_format="verbose_json"
    )
    prompt = AudioPrompt(sound(seconds=1.0), timestamps=True)
    expected = in_python(hearing, name, OmniRequest(prompt)).stages["transcriber"]
    tokenizer: Any = hearing.pipelines.find(name).tokenizer("transcriber")
    assert answer.language in ("de", "en", "zh"), "what the checkpoint knows"
    token = tokenizer.convert_tokens_to_ids(f"<|{answer.language}|>")
    assert expected.prompt_token_ids[1] == token


def test_a_long_recording_has_segments_from_its_begin_to_its_end(hearing: LiveServer, client: Any):
    answer = client.audio.transcriptions.create(
        model="transcribe_then_summarize",
        file=("speech.wav", sound(seconds=7.0)),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    prompt = AudioPrompt(sound(seconds=7.0), language="en", timestamps=True)
    expected = in_python(hearing, "transcribe_then_summarize", OmniRequest(prompt))
    windows = expected.stages["transcriber"].windows
    assert answer.duration == 7.0 and len(windows) > 2
    assert {each.seek for each in answer.segments} <= {
        round(100 * each.begin_s) for each in windows
    }
    times = [time for each in answer.segments for time in (each.start, each.end)]
    assert times == list(accumulate(times, max))
    assert times[-1] > 4.0, "beyond the second window"
    assert "".join(each.text for each in answer.segments) == answer.text


def test_words_have_the_times_that_python_tells(hearing: LiveServer, client: Any):
    """And what else may be asked of a transcription is asked by transformers' names."""
    asked = {"compression_ratio_threshold": 1.1, "logprob_threshold": -3.0, "prompt": "the rain"}
    answer = client.audio.transcriptions.create(
        model="transcribe_then_summarize",
        file=("speech.wav", sound(seconds=3.0)),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        prompt=asked["prompt"],
        extra_body={name: asked[name] for name in asked if name != "prompt"}
        | {"temperature": [0.0, 0.0001], "no_speech_threshold": 0.9},
    )
    options = TranscriptionOptions(
        **asked,
        temperature=(0.0, 0.0001),
        no_speech_threshold=0.9,
        return_token_timestamps=True,
    )
    prompt = AudioPrompt(sound(seconds=3.0), language="en", timestamps=True, transcription=options)
    expected = in_python(hearing, "transcribe_then_summarize", OmniRequest(prompt))
    windows = expected.stages["transcriber"].windows
    told = [(each.word.strip(), each.start, each.end) for w in windows for each in w.words]
    assert [(each.word, each.start, each.end) for each in answer.words] == told and len(told) > 3
    assert {each.temperature for each in answer.segments} <= {w.temperature for w in windows}
    silence = [each.no_speech_prob for each in answer.segments]
    known = [w.no_speech_prob for w in windows]
    assert all(min(abs(each - one) for one in known) < 1e-6 for each in silence)


def test_what_needs_a_tokenizer_works_where_stages_run_in_processes(checkpoint_cache: object):
    stage = {"kind": "autoregressive", "model": "seeded:whisper", "final_output": "text"}
    given = {"name": "ears", "runtime": {"kind": "processes"}, "stages": {"hears": stage}}
    config = PipelineConfig.model_validate(given)
    with LiveServer([config]) as server, server.client() as client:
        written = client.audio.transcriptions.create(
            model="ears", file=("speech.wav", sound(seconds=1.0)), response_format="verbose_json"
        )
        assert written.segments is not None and len(written.language) == 2


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client's own method
def test_speech_is_translated(hearing: LiveServer, client: Any):
    answer = client.audio.translations.create(
        model="transcribe_then_summarize", file=("speech.mp3", sound("mp3"))
    )
    prompt = AudioPrompt(sound("mp3"), task="translate")
    expected = in_python(hearing, "transcribe_then_summarize", OmniRequest(prompt))
    assert answer.text == expected.stages["transcriber"].text


_BOUNDARY = "a-line-of-no-field"


def read(*fields: tuple[str, str], num_files: int = 1) -> tuple[TranscriptionRequest, bytes]:
    """Read a form of these fields, in this order, behind the files."""
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


def test_each_field_is_taken_once() -> None:
    body, content = read(MODEL, ("language", "en"), ("temperature", "0.5"))
    assert (body.model, body.language, body.temperature) == ("a", "en", (0.5,))
    assert content == b"sound"


def test_words_go_with_verbose_json_alone() -> None:
    with pytest.raises(ApiError, match="word goes with verbose_json, not with json") as error:
        read(MODEL, SEGMENTS, WORDS)
    assert error.value.status == 400 and error.value.param == "timestamp_granularities"
    both = read(MODEL, SEGMENTS, WORDS, ("response_format", "verbose_json"))[0]
    assert both.wants_words and both.timestamp_granularities == ("segment", "word")


def test_options_are_those_of_a_prompt() -> None:
    assert read(MODEL, ("temperature", "0"), SEGMENTS)[0].options is None
    fields = ("prompt", "Ada"), ("temperature[]", "0"), ("temperature[]", "0.4")
    body = read(MODEL, *fields, ("condition_on_prev_tokens", "true"))[0]
    assert body.options == TranscriptionOptions(
        prompt="Ada", temperature=(0.0, 0.4), condition_on_prev_tokens=True
    )


def test_segments_are_what_there_is() -> None:
    for wished in ((SEGMENTS,), (SEGMENTS, SEGMENTS)):
        assert read(MODEL, *wished)[0].model == "a"


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "b"), ("language", "de"), ("response_format", "text"), ("temperature", "1")],
)
def test_a_field_that_is_given_twice_is_refused(name: str, value: str) -> None:
    with pytest.raises(ApiError, match=f"{name}: given 2 times; give it once") as error:
        read(
            MODEL,
            ("language", "en"),
            ("response_format", "json"),
            ("temperature", "0"),
            (name, value),
        )
    assert error.value.status == 400 and error.value.param == name


def test_a_second_file_is_refused() -> None:
    with pytest.raises(ApiError, match="file: given 2 times; give it once") as error:
        read(MODEL, num_files=2)
    assert error.value.status == 400 and error.value.param == "file"
    # One that comes as text, behind the file, took its place.
    with pytest.raises(ApiError, match="file: given 2 times; give it once") as error:
        read(MODEL, ("file", "text"))
    assert error.value.param == "file"


def test_a_form_without_a_file_says_so() -> None:
    for body in ((), (("file", "text"),)):
        with pytest.raises(ApiError, match="file: missing; it must be given as a file"):
            read(MODEL, *body, num_files=0)
    kind = "application/x-www-form-urlencoded"
    with pytest.raises(ApiError, match="file: missing"):
        asyncio.run(read_transcription(posted(urlencode([MODEL]), kind)))
