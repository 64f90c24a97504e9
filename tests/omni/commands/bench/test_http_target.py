"""Answers over HTTP are timed by piece, and each failure has a kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from omni.commands.bench.flags import BenchFlags
from omni.commands.bench.http_target import HttpTarget
from omni.commands.bench.load import MeasuredRequest, RequestFailure
from tests.support.fake_openai import (
    Break,
    FakeOpenAI,
    audio_piece,
    chat_piece,
    completion_piece,
    usage_piece,
)
from tests.support.patience import PATIENCE_S

CHAT = {"prompt": [{"role": "user", "content": "Hello"}], "sampling": {"max_tokens": 5}}
TEXT = {"prompt": "Once", "sampling": {"temperature": 0.0}}
DONE = b"data: [DONE]\n\n"


def saying(*pieces: Any) -> Callable[[str, Any], AsyncIterator[Any]]:
    async def answer(path: str, body: Any) -> AsyncIterator[Any]:
        for piece in pieces:
            if piece is Break:
                raise Break
            yield piece

    return answer


def within(work: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await work

    return asyncio.run(limited())


class SteppedRecord(MeasuredRequest):
    """A record with the clock of the test, which notifies it of each piece."""

    def __init__(self) -> None:
        self.time = 0.0
        self.noted = asyncio.Event()
        super().__init__(0.0, lambda: self.time)

    def text(self) -> None:
        super().text()
        self.noted.set()

    def audio(self, seconds: float) -> None:
        super().audio(seconds)
        self.noted.set()


async def ask(
    server: FakeOpenAI, line: dict[str, Any] = CHAT, **settings: Any
) -> tuple[str, MeasuredRequest]:
    async with HttpTarget(BenchFlags(url=server.url, **settings)) as target:
        record = MeasuredRequest(0.0, asyncio.get_running_loop().time)
        text = await target.prepare(line, Path())(record)
        record.end()
        return text, record


def test_pieces_with_text_or_sound_are_timed_at_arrival():
    async def main() -> MeasuredRequest:
        record = SteppedRecord()
        script: list[tuple[float, Any]] = [
            (1.0, chat_piece("", role="assistant")),
            (2.0, chat_piece("One")),
            (3.0, audio_piece(12_000, 48_000)),
            (5.0, chat_piece(" two")),
            (9.0, audio_piece(24_000)),
        ]

        async def answer(path: str, body: Any) -> AsyncIterator[Any]:
            for moment, piece in script:
                record.time = moment
                record.noted.clear()
                yield piece
                if moment > 1:
                    await record.noted.wait()
            record.time = 10.0
            yield usage_piece(7, 4, cached=3)
            yield DONE

        async with FakeOpenAI(answer) as server, HttpTarget(BenchFlags(url=server.url)) as target:
            assert await target.prepare(CHAT, Path())(record) == "One two"
        record.end()
        return record

    record = within(main())
    assert record.text_times == [2.0, 5.0] and record.first_token == 2.0
    assert record.first_audio == 3.0
    assert record.audio_s == 0.25 + 1.0, "the second rate is OpenAI's by default"
    assert record.end_to_end == 10.0
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (7, 3, 4)


def test_a_chat_is_requested_as_a_stream_with_usage_and_the_key():
    async def main() -> list[Any]:
        async with FakeOpenAI(saying(chat_piece("x"), DONE)) as server:
            _, record = await ask(server, api_key="secret")
            assert record.prompt_tokens is None and record.num_tokens == 1
            await ask(server, speech=True, voice="Ethan")
            await ask(server, line={**CHAT, "speaker": "Chelsie"}, speech=True)
            await ask(server, line={**CHAT, "speaker": "Chelsie"})
            return server.requests

    first, spoken, named, silent = within(main())
    path, headers, body = first
    assert path == "/v1/chat/completions" and headers["authorization"] == "bearer secret"
    assert body == {
        "model": "fake",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "authorization" not in spoken[1]
    assert spoken[2]["modalities"] == ["text", "audio"]
    assert spoken[2]["audio"] == {"voice": "Ethan", "format": "pcm16"}
    assert named[2]["audio"] == {"voice": "Chelsie", "format": "pcm16"}
    assert "audio" not in silent[2] and "modalities" not in silent[2]


def ended(index: int) -> dict[str, Any]:
    """The last piece of a completion."""
    piece = completion_piece("")
    piece["choices"][0] |= {"index": index, "finish_reason": "length"}
    return piece


ENDED = ended(0)
SECOND = completion_piece("x")
SECOND["choices"][0]["index"] = 1


def test_a_server_may_leave_out_the_last_event_of_complete_answers():
    """The server of transformers does."""

    async def main() -> tuple[str, MeasuredRequest]:
        async with FakeOpenAI(saying(completion_piece("Once"), SECOND, ended(1), ENDED)) as server:
            return await ask(server, TEXT)

    text, record = within(main())
    assert text == "Once" and record.num_tokens == 2


def failure_of(server: FakeOpenAI) -> RequestFailure:
    async def main() -> None:
        async with server:
            await ask(server)

    with pytest.raises(RequestFailure) as failure:
        within(main())
    return failure.value


@pytest.mark.parametrize(
    ("pieces", "kind", "reported"),
    [
        ([chat_piece("a"), Break], "connection broke", ""),
        ([Break], "connection broke", ""),
        ([chat_piece("a")], "cut off", "without [DONE]"),
        ([ENDED, SECOND], "cut off", "before every completion said why it ended"),
        ([chat_piece("a"), {"error": {"message": "died"}}, DONE], "error in the stream", "died"),
        ([b"data: {broken\n\n"], "unreadable event", "broken"),
        ([b"data: [1]\n\n"], "unreadable event", "it is no object"),
        ([b'data: {"choices": [3]}\n\n'], "unreadable event", "AttributeError"),
        ([b'data: {"choices": 3}\n\n'], "unreadable event", "TypeError"),
        ([chat_piece(None, audio={"data": "not base64"})], "unreadable event", "no base64"),
        ([{"usage": {"prompt_tokens": -1}}], "unreadable event", "is -1"),
        ([{"usage": {"prompt_tokens": "many"}}], "unreadable event", "'many'"),
        ([b"data: " + b"[" * 200_000 + b"\n\n"], "unreadable event", ""),
    ],
)
def test_a_broken_stream_is_a_failure_of_its_kind(pieces: list[Any], kind: str, reported: str):
    failure = failure_of(FakeOpenAI(saying(*pieces)))
    assert failure.kind == kind and reported in str(failure)
    assert not failure.is_rejection


@pytest.mark.parametrize(
    ("status", "error", "kind", "reported"),
    [
        (429, {"error": {"message": "full"}}, "status 429", "full"),
        (500, {"detail": "oh"}, "status 500", "oh"),
        (400, b"<html>", "status 400", "<html>"),
        (503, b"", "status 503", "an empty answer"),
        (502, b"x" * 500_000, "status 502", "xxx"),
    ],
)
def test_a_status_is_a_failure_and_429_a_rejection(
    status: int, error: Any, kind: str, reported: str
):
    server = FakeOpenAI()
    server.status, server.error = status, error
    failure = failure_of(server)
    assert failure.kind == kind and reported in str(failure)
    assert failure.is_rejection is (status == 429)


def test_an_answer_without_a_stream_and_a_closed_server_are_failures():
    async def main(is_gone: bool) -> None:
        async with FakeOpenAI(saying(b"{}")) as server:
            server.content_type = "application/json"
            async with HttpTarget(BenchFlags(url=server.url)) as target:
                if is_gone:
                    server._server.close()
                    await server._server.wait_closed()
                await target.prepare(CHAT, Path())(MeasuredRequest(0.0))

    for is_gone, kind in ((False, "no stream"), (True, "no connection")):
        with pytest.raises(RequestFailure) as failure:
            within(main(is_gone))
        assert failure.value.kind == kind


@pytest.mark.parametrize(
    ("models", "wanted", "found"),
    [
        (["one"], None, "one"),
        (["one", "two"], "two", "two"),
        (None, "any", "any"),
        (["one", "two"], None, "--model: the server has several or none, name one: one, two"),
        ([], None, "--model: the server has several or none, name one: none"),
        (["one"], "won", "--model: the server has no 'won'; it has one"),
        (None, None, "name one with --model"),
    ],
)
def test_the_model_is_found_before_anything_is_measured(
    models: list[str] | None, wanted: str | None, found: str
):
    async def main() -> str:
        async with FakeOpenAI(models=models) as server:
            try:
                async with HttpTarget(BenchFlags(url=server.url, model=wanted)) as target:
                    return target.model
            except ValueError as error:
                return str(error)

    assert found in within(main())


def test_a_wrong_key_and_an_address_without_a_server_name_their_flags():
    async def main(status: int, url: str | None = None) -> None:
        async with FakeOpenAI() as server:
            server.status = status
            async with HttpTarget(BenchFlags(url=url or server.url)):
                pass

    with pytest.raises(ValueError, match="see --api-key: as it was told to"):
        within(main(401))
    with pytest.raises(ValueError, match="--url http://127.0.0.1:1: cannot be reached"):
        within(main(200, "http://127.0.0.1:1"))


def test_an_address_may_end_in_v1():
    urls = ("http://x:1/v1/", "http://x:1")
    assert {HttpTarget(BenchFlags(url=each)).base_url for each in urls} == {"http://x:1/v1"}
