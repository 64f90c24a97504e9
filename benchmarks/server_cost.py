"""Cost of the HTTP server: the same requests through ``Omni`` in process and over HTTP.

Run it on a quiet machine::

    python -m benchmarks.server_cost --rounds 5
    python -m benchmarks.server_cost --pipeline small --rounds 5
    python -m benchmarks.server_cost --pipeline omni_speech --rounds 9
    python -m benchmarks.server_cost --pipeline omni_speech --rounds 9 --turns 4
    python -m benchmarks.server_cost --pipeline omni_speech --rounds 40 --turns 4 --ways streamed

The server's pipeline runs in a separate process, as with ``omni serve``; with ``--inline`` it runs
in the server's own. The HTTP clients run in another process and share the cores; with
``--together`` they run in the server's process, whose GIL makes the clients' cost a part of the
result. Text is streamed token by token, by the model of 0.1 B of ``engine_cpu.py`` (256 and 64
tokens) or a small one, whose steps take a few milliseconds. The goal is at most 5 % for the former,
and for the voice pipeline as well.

Requests that arrive one after the other run in smaller batches, with or without a server. So there
are several ways in process, selected by ``--ways``:

- ``in one call``: all at once, which run in lockstep;
- ``in process``: one coroutine per request, some of which start a step later than others;
- ``streamed``: likewise, and each consumes its deltas, as HTTP does;
- ``at its times``: likewise, each with the same delay as it reached the pipeline over HTTP in
  the same round. The difference between HTTP and this one is the server itself.

With ``--whole`` HTTP answers without streaming, like ``in process``.

With ``--turns`` each client sends several requests, each as soon as the last is answered, as under
sustained load; on one connection, which is opened before the clock starts, as in client libraries.

Three costs are reported, each as the median of the rounds' ratios, with the range that contains
90 % of the medians of resampled rounds (bootstrap): the variation from run to run.

- time: the wall-clock effect. Clients and the pipeline share the cores, so that the clients' CPU
  time, also reported, is a part of this cost;
- CPU time of this process and of its pipeline process, without separate clients;
- CPU time of the serving thread, minus that of the requesting thread in process, relative to the
  whole CPU time of requests in process: the server's own cost only, which other work on the
  machine hardly disturbs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import psutil

from benchmarks.ratios import Ratios
from benchmarks.word_checkpoint import VOCAB_SIZE, word_checkpoint
from omni import ChatPrompt, OmniRequest, TextPrompt, TokensPrompt
from omni.pipelines.pipeline_config import PipelineConfig
from omni.runtime.omni import Omni
from omni.server.http_server import HttpServer, bind
from omni.server.serving.pipeline_server import PipelineServer
from omni.server.serving.settings import ServerSettings

_CONCURRENCIES = (1, 2, 4, 8, 16)
_WAYS = ("in one call", "in process", "streamed", "at its times")
_PROMPT = 256
_ACCEPTING_S = 0.05
_LENGTH = re.compile(rb"^HTTP/1\.1 200 .*\r\ncontent-length: (\d+)\r\n", re.S)


def main() -> None:
    """Print seconds of the ways, run alternating, and the time to first audio by concurrency."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", default="text", help="text, small, or one that speaks")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--turns", type=int, default=1, help="of each of the requests' clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--ways", nargs="+", choices=_WAYS, default=_WAYS, help="in process, to compare with"
    )
    parser.add_argument("--whole", action="store_true", help="HTTP does not stream")
    parser.add_argument("--inline", action="store_true", help="stages in the server's process")
    parser.add_argument("--together", action="store_true", help="clients in the server's process")
    given = parser.parse_args()
    speaks = given.pipeline not in ("text", "small")
    with TemporaryDirectory(prefix="omni-words-") as folder:
        config = PipelineConfig.load(given.pipeline) if speaks else None
        if config is None:
            is_large = given.pipeline == "text"
            model = str(word_checkpoint(Path(folder))) if is_large else "seeded:qwen2-medium"
            config = _text_pipeline(model)
        _measure(config, given, _Asked(config.name, speaks, given.pipeline == "text", given.whole))


def _measure(config: PipelineConfig, given: argparse.Namespace, asked: _Asked) -> None:
    server = PipelineServer([config], ServerSettings(port=0), apart=not given.inline)
    loaded = threading.Event()
    server.on_loaded = loaded.set
    http = HttpServer(server, bind(server.settings))
    port = http.listener.getsockname()[1]
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    while not loaded.wait(0.05):
        if server.failure is not None:
            raise server.failure
    served = server.find(config.name).omni
    ask = _Asker(port, asked)
    with (
        nullcontext(served) if given.inline else Omni(config) as omni,
        nullcontext(partial(_connected, ask)) if given.together else _apart(ask) as clients,
    ):
        _Comparison(omni, served, ask, clients, given, thread).run()
        for concurrency in _CONCURRENCIES if asked.speaks and not asked.whole else ():
            first = clients(_numbers(concurrency, 99), 1)()
            print(
                f"first sound at {concurrency:2}: median {statistics.median(first.first_s):.3f} s"
            )
    http.stop()
    thread.join()


@dataclass(frozen=True, slots=True)
class _Answered:
    """Clients' measurements: seconds until the first audio or token, and their own CPU time."""

    first_s: list[float]
    cpu_s: float


_Clients = Callable[[Sequence[int], int], Callable[[], _Answered]]
"""Connects clients, given the numbers of their first requests and of turns; returns a function that
runs them."""


def _connected(ask: _Asker, numbers: Sequence[int], turns: int) -> Callable[[], _Answered]:
    """Connect clients that run in the calling thread."""
    sockets = DefaultSelector()
    clients = [
        _Client(ask, sockets, range(number, number + turns * len(numbers), len(numbers)))
        for number in numbers
    ]
    time.sleep(_ACCEPTING_S)

    def run() -> _Answered:
        began = time.thread_time()
        with sockets:
            for client in clients:
                client.ask()
            while sockets.get_map():
                for key, _ in sockets.select():
                    key.data()
        first_s = [each for client in clients for each in client.first_s]
        return _Answered(first_s, time.thread_time() - began)

    return run


class _Client:
    """Sends one request after the other on one connection, as client libraries do. It uses a plain
    socket: the clients' CPU time is not a cost of the server, and a library needs more.
    """

    def __init__(self, ask: _Asker, sockets: DefaultSelector, numbers: Iterable[int]) -> None:
        self.first_s: list[float] = []
        self._ask = ask
        self._sockets = sockets
        self._numbers = iter(numbers)
        self._end = b""
        self._has_begun = False
        self._asked_s = 0.0
        self._num_left = 0
        self._socket = socket.create_connection(("127.0.0.1", ask.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets.register(self._socket, EVENT_READ, self._read)

    def ask(self) -> None:
        """Send the next request, if there is any."""
        number = next(self._numbers, None)
        if number is None:
            self._sockets.unregister(self._socket)
            self._socket.close()
            return
        self._end, self._has_begun, self._asked_s = b"", False, time.perf_counter()
        self._socket.sendall(self._ask.content(number))

    def _read(self) -> None:
        piece = self._socket.recv(1 << 18)
        if not self._has_begun and self._ask.mark in self._end + piece:
            self._has_begun = True
            self.first_s.append(time.perf_counter() - self._asked_s)
        self._end = (self._end + piece)[-100:]
        if not piece:
            raise RuntimeError(f"the answer is not whole: {self._end!r}")
        if self._ask.whole:
            self._num_left -= len(piece)
            if (found := _LENGTH.search(piece)) is not None:
                self._num_left = int(found[1]) - len(piece.partition(b"\r\n\r\n")[2])
            if self._num_left == 0:
                self.ask()
        elif self._end.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            self.ask()


@contextmanager
def _apart(ask: _Asker) -> Iterator[_Clients]:
    """Run clients in a separate process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_orders, args=(ask, theirs), daemon=True)
    process.start()
    theirs.close()  # so that recv() raises if the process dies
    ours.recv()  # its imports are done

    def run() -> _Answered:
        ours.send(None)
        answered: _Answered = ours.recv()
        return answered

    def connected(numbers: Sequence[int], turns: int) -> Callable[[], _Answered]:
        ours.send((numbers, turns))
        ours.recv()
        return run

    yield connected
    process.terminate()
    process.join()


def _serve_orders(ask: _Asker, orders: Connection) -> None:
    orders.send(None)
    while True:
        run = _connected(ask, *orders.recv())
        orders.send(None)
        orders.recv()
        orders.send(run())


@dataclass(frozen=True, slots=True)
class _Cost:
    """Cost of some requests: wall-clock seconds, and CPU seconds of this process, of its thread
    that receives requests and sends answers, and of clients in other processes.
    """

    seconds: float
    cpu_s: float
    thread_s: float
    clients_s: float


class _Comparison:
    """Runs the ways alternating, in an order that is reversed every other round."""

    def __init__(
        self,
        omni: Omni,
        served: Omni,
        ask: _Asker,
        clients: _Clients,
        given: argparse.Namespace,
        server: threading.Thread,
    ) -> None:
        self._omni, self._served = omni, served
        children = psutil.Process().children(recursive=True)
        self._pipeline_clocks = [
            _cpu_clock(each.pid) for each in children if each.name()[:5] == "omni "
        ]
        self._ask = ask
        self._num, self._turns, self._rounds = given.requests, given.turns, given.rounds
        self._times: list[float] = []
        self._clients_s = 0.0
        self._server = Path(f"/proc/self/task/{server.native_id}/schedstat")
        ways: dict[str, Callable[[int], Callable[[], object]]] = {
            "in one call": lambda number: partial(self._in_one_call, number),
            "in process": lambda number: partial(self._by_coroutines, self._whole, number),
            "streamed": lambda number: partial(self._by_coroutines, self._streamed, number),
            "over HTTP": lambda number: partial(
                self._noting_times, clients(_numbers(self._num, number), self._turns)
            ),
            "at its times": lambda number: lambda: asyncio.run(self._at_times(number)),
        }
        self._others = [name for name in _WAYS if name in given.ways]
        self._ways = {
            name: way for name, way in ways.items() if name in ("over HTTP", *self._others)
        }

    def run(self) -> None:
        """Measure and print."""
        seen: dict[str, list[_Cost]] = {name: [] for name in self._ways}
        names = [name for name in self._ways if name != "at its times"]
        last = [name for name in self._ways if name == "at its times"]  # needs the times of HTTP
        for number in range(-1, self._rounds):  # the first is the warm-up
            for name in [*(names if number % 2 else reversed(names)), *last]:
                for each in {self._omni, self._served}:
                    with each.paused() as pipeline:
                        for stage in pipeline.stages.values():
                            stage.reset_prefix_cache()
                cost = self._cost(self._ways[name](number))
                if number >= 0:
                    seen[name].append(cost)
        self._print_costs(seen)

    def _cost(self, run: Callable[[], object]) -> _Cost:
        self._clients_s = 0.0
        before = self._clocks()
        run()
        seconds, cpu, thread = (
            after - first for after, first in zip(self._clocks(), before, strict=True)
        )
        return _Cost(seconds, cpu, thread, self._clients_s)

    def _print_costs(self, seen: dict[str, list[_Cost]]) -> None:
        count = self._num * self._turns
        print(f"{self._rounds} rounds of {count} requests each way, {self._num} at a time")
        for name, each in seen.items():
            seconds = statistics.median(cost.seconds for cost in each)
            cpu, thread, clients = (
                1000 * statistics.median(getattr(cost, kind) for cost in each) / count
                for kind in ("cpu_s", "thread_s", "clients_s")
            )
            print(
                f"{name:12}: median {seconds:.3f} s; CPU a request: {cpu:.1f} ms, of these "
                f"{thread:.2f} by the thread that asks or serves; {clients:.2f} by clients apart"
            )
        print("over HTTP more than ..., medians of the rounds' own ratios:")
        for other in reversed(self._others):
            pairs = list(zip(seen["over HTTP"], seen[other], strict=True))
            time_ = Ratios([over.seconds / within.seconds for over, within in pairs])
            cpu_ = Ratios([over.cpu_s / within.cpu_s for over, within in pairs])
            own = Ratios(
                [1 + (over.thread_s - within.thread_s) / within.cpu_s for over, within in pairs]
            )
            print(f"  {other:12}: time {time_}")
            print(f"  {'':12}  CPU  {cpu_}")
            print(f"  {'':12}  CPU of the serving thread alone, of all {own}")

    def _clocks(self) -> tuple[float, float, float]:
        """Read clocks in seconds: wall, CPU, and CPU of the requesting and serving threads."""
        server = int(self._server.read_text().split()[0]) / 1e9
        cpu = time.process_time() + sum(map(time.clock_gettime, self._pipeline_clocks))
        return time.perf_counter(), cpu, server + time.thread_time()

    def _in_one_call(self, number: int) -> object:
        numbers = _numbers(self._num * self._turns, number)
        return self._omni.generate(list(map(self._ask.request, numbers)))

    async def _whole(self, number: int) -> None:
        await self._omni.agenerate(self._ask.request(number))

    async def _streamed(self, number: int) -> None:
        async for _ in self._omni.astream(self._ask.request(number)):
            pass

    def _by_coroutines(self, ask: Callable[[int], Awaitable[None]], number: int) -> None:
        async def client(first: int) -> None:
            for turn in range(self._turns):
                await ask(first + turn * self._num)

        async def clients() -> None:
            await asyncio.gather(*map(client, _numbers(self._num, number)))

        asyncio.run(clients())

    def _noting_times(self, ask: Callable[[], _Answered]) -> object:
        """Send requests over HTTP, and record when each reached the pipeline."""
        times: list[float] = []
        submit = self._served._driver.submit

        def noting(*given: Any, **options: Any) -> object:
            times.append(time.perf_counter())
            return submit(*given, **options)

        with patch.object(self._served._driver, "submit", noting):
            answered = ask()
        self._clients_s = answered.cpu_s
        self._times = [each - times[0] for each in times]
        return times

    async def _at_times(self, number: int) -> None:
        async def ask(number: int, after: float) -> None:
            await asyncio.sleep(after)
            await self._omni.agenerate(self._ask.request(number))

        numbers = _numbers(self._num * self._turns, number)
        await asyncio.gather(*map(ask, numbers, self._times))


def _cpu_clock(pid: int) -> int:
    """Return the id of a process's CPU clock on Linux, which is finer than psutil's ticks."""
    return (~pid << 3) | 2


def _numbers(count: int, round_number: int) -> list[int]:
    return [10_000 * (round_number + 1) + each for each in range(count)]


@dataclass(frozen=True, slots=True)
class _Asked:
    """Properties of the requests: model, for speech, with token ids, answered without streaming."""

    model: str
    speaks: bool
    by_ids: bool
    whole: bool


class _Asker:
    """Creates requests.

    Attributes:
        port: port of the server.
        mark: bytes that an answer contains from its first audio or token on.
        whole: true if answers are not streamed.
    """

    def __init__(self, port: int, asked: _Asked) -> None:
        self.port = port
        self.mark = b'"data":"' if asked.speaks else b"data: {"
        self._model = asked.model
        self._speaks = asked.speaks
        self.whole = asked.whole
        self._by_ids = asked.by_ids

    def request(self, number: int) -> OmniRequest:
        """Create the request for ``Omni``."""
        if self._speaks:
            return OmniRequest(ChatPrompt(tuple(self._messages(number))))
        if self._by_ids:
            return OmniRequest(TokensPrompt(tuple(self._ids(number))))
        return OmniRequest(TextPrompt(self._text(number)))

    def content(self, number: int) -> bytes:
        """Create the same request for HTTP."""
        path = "/v1/completions"
        prompt = self._ids(number) if self._by_ids else self._text(number)
        body: dict[str, Any] = {"prompt": prompt}
        if self._speaks:
            path = "/v1/chat/completions"
            body = {"messages": self._messages(number), "modalities": ["text", "audio"]}
            body["audio"] = {"format": "wav" if self.whole else "pcm16"}
        content = json.dumps({"model": self._model, "stream": not self.whole, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        return head.encode() + content

    def _messages(self, number: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"Tell me number {number} of the tides."}]

    def _ids(self, number: int) -> list[int]:
        chance = random.Random(number)
        return [chance.randrange(1000, VOCAB_SIZE) for _ in range(_PROMPT)]

    def _text(self, number: int) -> str:
        return " ".join(f"The clock {number + place} strikes." for place in range(24))


def _text_pipeline(model: str) -> PipelineConfig:
    stage = {
        "kind": "autoregressive",
        "model": model,
        "engine": {"num_blocks": 1024, "max_num_batched_tokens": 2048},
        "sampling": {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True},
        "outputs": [],
        "final_output": "text",
    }
    return PipelineConfig.model_validate({"name": "text", "stages": {"writer": stage}})


if __name__ == "__main__":
    main()
