"""Overload, disconnecting clients and slow readers do not affect other clients.

The speed is measured by ``benchmarks/overload.py`` and ``server_load.py``.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from omni.commands.bench.flags import BenchFlags
from omni.commands.bench.http_target import HttpTarget
from omni.commands.bench.load import (
    LevelRun,
    LoadLevel,
    MeasuredRequest,
    RequestFailure,
    Send,
    line_source,
)
from omni.server.serving.admission_queue import AdmissionQueue, QueuePlace
from omni.server.serving.api_error import ApiError
from tests.support.gated_stage import GATES, gated_pipeline
from tests.support.http_call import raw_post
from tests.support.live_server import LiveServer
from tests.support.one_writer import one_writer
from tests.support.patience import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def small(checkpoint_cache: object) -> Iterator[LiveServer]:
    """One small language model that runs two requests at once, with three more in the queue."""
    sampling = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    chat = one_writer("chat", sampling=sampling)
    with LiveServer([chat], max_running_requests=2, max_waiting_requests=3) as running:
        running.send_little_at_once()
        yield running


async def checked(send: Send, expected: str, record: MeasuredRequest) -> str:
    answer = await send(record)
    if answer != expected:
        raise RequestFailure("another answer", answer)
    return answer


@pytest.mark.parametrize("level", [LoadLevel(concurrency=24), LoadLevel(rate=2000.0)])
def test_under_overload_requests_are_answered_correctly_or_refused(
    small: LiveServer, level: LoadLevel
):
    async def overload() -> LevelRun:
        async with HttpTarget(BenchFlags(url=small.url)) as target:
            lines = [{"prompt": f"The tide of day {number} came in"} for number in range(5)]
            sends = [target.prepare(line, Path()) for line in lines]
            alone = [await send(MeasuredRequest(0.0)) for send in sends]
            assert len(set(alone)) == 5
            run = LevelRun(level, 150, BenchFlags(timeout=PATIENCE_S))
            pairs = zip(sends, alone, strict=True)
            await run.run(line_source([partial(checked, send, text) for send, text in pairs]))
            return run

    tasks = small.num_tasks()
    run = asyncio.run(overload())
    failures = [record.failure for record in run.records if record.failure is not None]
    assert {failure.kind for failure in failures} == {"status 429"}
    assert 0 < len(failures) < len(run.records) == 150
    assert "2 requests run and 3 wait, of at most 2 and 3" in str(failures[0])
    small.check_nothing_is_left()
    wait_for(lambda: small.num_tasks() <= tasks)


def test_a_full_pipeline_refuses_requests_before_any_work():
    """Files of a request are decoded, or fetched, only when there is room for it."""
    pipelines = [gated_pipeline("full"), gated_pipeline("free")]
    with LiveServer(pipelines, max_running_requests=1, max_waiting_requests=0) as server:
        client = server.client()
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,no base64!"}}
        wrong: Any = [{"role": "user", "content": [image]}]
        with pytest.raises(openai.BadRequestError, match="base64"):
            client.chat.completions.create(model="full", messages=wrong)
        queue = server.pipelines.pipelines["full"].queue
        with ThreadPoolExecutor() as pool:
            running = pool.submit(client.completions.create, model="full", prompt="x")
            wait_for(lambda: queue.num_running == 1)
            with pytest.raises(openai.RateLimitError):
                client.chat.completions.create(model="full", messages=wrong)
            with pytest.raises(openai.RateLimitError):
                client.post("/pipelines/full", cast_to=object, body={"prompt_embeds": "wrong"})
            GATES["free"].open()
            other = client.completions.create(model="free", prompt="y")
            assert other.choices[0].text == "free(y)"
            GATES["full"].open()
            assert running.result().choices[0].text == "full(x)"
        counted = server.pipelines.meters.text().decode()
        assert 'omni_requests_total{model="full",status="rejected"} 2.0' in counted
        assert 'omni_requests_total{model="free",status="rejected"}' not in counted


def test_a_full_server_reads_no_bodies_and_lists_few_rejected_requests():
    with LiveServer([gated_pipeline("full")], max_running_requests=1, max_waiting_requests=0) as (
        server
    ):
        client = server.client()
        queue = server.pipelines.pipelines["full"].queue
        GATES["full"].open(2)
        assert client.completions.create(model="full", prompt="x").choices[0].text == "full(x)"
        with ThreadPoolExecutor() as pool:
            running = pool.submit(client.completions.create, model="full", prompt="y")
            wait_for(lambda: queue.num_running == 1)
            for _ in range(300):
                with connected(server) as sender:
                    # The body is never sent.
                    sender.sendall(raw_request(model="?", prompt="z" * 1000).partition(b"z")[0])
                    status, _, rest = sender.recv(1 << 16).partition(b"\r\n")
                    assert status == b"HTTP/1.1 429 Too Many Requests"
                    assert b"retry-after: " in rest.lower()
            GATES["full"].open()
            assert running.result().choices[0].text == "full(y)"
        reported = client.get("/pipelines/full/requests", cast_to=dict[str, Any])["data"]
        assert {each["status"] for each in reported} == {"ok", "rejected"}
        assert [each["status"] for each in reported].count("ok") == 2
        assert reported[0]["status"] == "ok", "the last to end comes first"
        counted = server.pipelines.meters.text().decode()
        assert 'omni_requests_total{model="full",status="rejected"} 300.0' in counted


def raw_request(**fields: Any) -> bytes:
    return raw_post(json.dumps({"model": "chat", "stream": True, **fields}).encode())


def connected(server: LiveServer) -> socket.socket:
    where = urlsplit(server.url)
    client = socket.socket()
    # Small, but large enough that Linux does not delay each further piece by 0.2 s.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    client.settimeout(PATIENCE_S)
    client.connect((where.hostname, where.port))
    return client


def test_many_clients_that_disconnect_anywhere_leave_no_task(small: LiveServer):
    tasks = small.num_tasks()

    def leave(number: int) -> None:
        chance = random.Random(number)
        asked = {"max_tokens": 200, "ignore_eos": True, "stream": chance.random() < 0.7}
        request = raw_request(prompt=["x", f"day {number}"], **asked)
        said = request if chance.random() < 0.8 else request[: chance.randrange(len(request))]
        with connected(small) as client, suppress(TimeoutError):
            client.sendall(said)
            client.settimeout(chance.expovariate(20.0) + 0.001)
            while client.recv(chance.choice([1, 100, 10_000])):
                pass

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(leave, range(80)))
    small.check_nothing_is_left()
    wait_for(lambda: small.num_tasks() <= tasks)


def test_a_client_that_does_not_read_blocks_nobody_and_gets_its_answer_later(small: LiveServer):
    many = {"max_tokens": 600, "logprobs": 5, "ignore_eos": True, "prompt": "The slow tide"}
    client = small.client()
    whole = client.post("/completions", cast_to=dict[str, Any], body={"model": "chat", **many})
    expected = whole["choices"][0]["text"]
    tasks = small.num_tasks()
    queue = small.pipelines.pipelines["chat"].queue
    slow = [connected(small) for _ in range(2)]
    try:
        for each in slow:
            each.sendall(raw_request(**many))
        wait_for(lambda: small.num_tasks() > tasks + 1)
        # As many clients as may run at once do not read; these requests run nevertheless.
        for number in range(4):
            stream = client.completions.create(
                model="chat", prompt=f"day {number}", max_tokens=5, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in stream)
        wait_for(lambda: not queue.num_running)
        assert small.num_tasks() > tasks + 1, "both answers are generated, but not yet sent"
        for each in slow:
            assert said_to(each) == expected
    finally:
        for each in slow:
            each.close()
    small.check_nothing_is_left()


def said_to(client: socket.socket) -> str:
    """Read a stream to its end and return its text."""
    answer = bytearray()
    while b"data: [DONE]" not in answer:
        chunk = client.recv(1 << 16)
        assert chunk, "the stream was cut off"
        answer += chunk
    events = [line for line in bytes(answer).split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event[6:])["choices"]]
    return "".join(choice["text"] for choice in choices)


def is_admitted(place: QueuePlace) -> bool:
    return place.admitted.done() and not place.admitted.cancelled()


def test_requests_are_admitted_by_priority_and_then_by_arrival():
    async def run() -> None:
        queue = AdmissionQueue(1, 8)
        (first,) = queue.enter([5])
        places = [queue.enter([priority])[0] for priority in (1, 0, 1, -1, 0)]
        order = []
        queue.leave(first)
        for _ in places:
            (now,) = (place for place in places if is_admitted(place) and not place.has_left)
            order.append(places.index(now))
            queue.leave(now)
        assert order == [3, 1, 4, 0, 2]
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())


def test_a_group_of_requests_waits_as_one_and_is_admitted_or_refused_as_a_whole():
    async def run() -> None:
        queue = AdmissionQueue(2, 2)
        first = queue.enter([0, 0, 0])
        assert [is_admitted(place) for place in first] == [True, True, False]
        second = queue.enter([0] * 100)
        assert (queue.num_running, queue.num_waiting) == (2, 2)
        with pytest.raises(ApiError) as error:
            queue.enter([0])
        assert error.value.status == 429 and error.value.headers["Retry-After"]
        for place in first:
            queue.leave(place)
        assert (queue.num_running, queue.num_waiting) == (2, 1)
        for place in second:
            queue.leave(place)
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())


def test_a_request_that_leaves_the_queue_frees_its_slot():
    async def run() -> None:
        queue = AdmissionQueue(1, 1)
        (running,), (waiting,) = queue.enter([0]), queue.enter([0])
        queue.leave(waiting)
        queue.leave(waiting)
        (next_one,) = queue.enter([0])
        queue.leave(running)
        assert is_admitted(next_one) and waiting.admitted.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_no_slot_of_the_queue_is_lost(seed: int):
    async def run() -> None:
        draw = random.Random(seed)
        queue = AdmissionQueue(draw.randint(1, 4), draw.randint(0, 6))
        places: list[QueuePlace] = []
        for _ in range(300):
            if draw.random() < 0.6:
                with suppress(ApiError):
                    places += queue.enter([draw.randint(0, 2)] * draw.randint(1, 3))
            elif places:
                queue.leave(places.pop(draw.randrange(len(places))))
            waiting = [place for place in places if not is_admitted(place)]
            assert queue.num_running == len(places) - len(waiting) <= queue.max_running
            assert queue.num_waiting == len({id(place.waiting) for place in waiting})
            assert queue.num_running == queue.max_running or not waiting
        for place in places:
            queue.leave(place)
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())
