"""The form of a transcription: what is given twice, or is none of its fields, is refused."""

from __future__ import annotations

import asyncio
from urllib.parse import urlencode

import pytest
from starlette.requests import Request

from omni.server.openai.transcription import TranscriptionRequest, read_transcription
from omni.server.serving.api_error import ApiError

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
GIVEN = (("language", "en"), ("response_format", "json"), ("temperature", "0"))
WORDS = ("timestamp_granularities[]", "word")
SEGMENTS = ("timestamp_granularities[]", "segment")


def test_each_field_is_taken_once() -> None:
    body, content = read(MODEL, ("language", "en"), ("temperature", "0.5"))
    assert (body.model, body.language, body.temperature) == ("a", "en", 0.5)
    assert content == b"sound"


@pytest.mark.parametrize("given", [(WORDS,), (WORDS, SEGMENTS), (SEGMENTS, WORDS)])
def test_words_are_refused_wherever_they_stand_in_a_list(
    given: tuple[tuple[str, str], ...],
) -> None:
    with pytest.raises(ApiError, match="not supported by this server.*word") as error:
        read(MODEL, *given)
    assert error.value.status == 400 and error.value.param == "timestamp_granularities[]"


def test_segments_are_what_there_is() -> None:
    for given in ((SEGMENTS,), (SEGMENTS, SEGMENTS)):
        assert read(MODEL, *given)[0].model == "a"


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
