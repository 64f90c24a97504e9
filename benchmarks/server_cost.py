"""What the HTTP server costs: the same requests through ``Omni`` in process and over HTTP.

Run it on a quiet machine::

    python -m benchmarks.server_cost --rounds 5
    python -m benchmarks.server_cost --pipeline small --rounds 5
    python -m benchmarks.server_cost --pipeline omni_speech --rounds 5
    python -m benchmarks.server_cost --pipeline omni_speech --rounds 5 --turns 4

What asks over HTTP is a process of its own, as any client is, and shares the cores; with
``--together`` it shares the server's process as well, whose one lock makes the client's cost a part
of the figure. Text is streamed token by token, by the model of 0.1 B of
``engine_cpu.py`` (256 and 64 tokens) or a small one, whose steps take a few milliseconds. The goals
are at most 5 % for the former and 2 % for the voice pipeline.

Requests that come one after the other share smaller batches, whoever takes them in. So there are
three ways in process:

- ``in one call``: all at once, which run in lockstep;
- ``in process``: by a coroutine for each, of which some begin a step later than others;
- ``at its times``: likewise, each as long after the first as it came to the pipeline over HTTP in
  the same round. What HTTP takes beyond this one is the server itself.

With ``--turns`` each of the clients asks so many times, as soon as it is answered, as under a load
that lasts.

On a machine that does other things too, times say little; the CPU that the server's own thread took
for a request is then the better figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.word_checkpoint import VOCAB_SIZE, word_checkpoint
from omni import ChatPrompt, OmniRequest, TextPrompt, TokensPrompt
from omni.pipelines.pipeline_config import PipelineConfig
from omni.runtime.omni import Omni
from omni.runtime.uncollected import keep_for_good
from omni.server.http_server import HttpServer, bind
from omni.server.serving.pipeline_server import PipelineServer
from omni.server.serving.settings import ServerSettings

__all__ = ["main"]

_CONCURRENCIES = (1, 2, 4, 8, 16)
_PROMPT = 256


def main() -> None:
    """Print seconds of both ways in turns, and the first sound by concurrency."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", default="text", help="text, small, or one that speaks")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--turns", type=int, default=1, help="of each of the requests' clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--together", action="store_true", help="clients in the server's process")
    given = parser.parse_args()
    speaks = given.pipeline not in ("text", "small")
    with TemporaryDirectory(prefix="omni-words-") as folder:
        config = PipelineConfig.load(given.pipeline) if speaks else None
        if config is None:
            is_large = given.pipeline == "text"
            model = str(word_checkpoint(Path(folder))) if is_large else "seeded:qwen2-medium"
            config = _text_pipeline(model)
        _measure(config, given, _Asked(config.name, speaks, given.pipeline == "text"))


def _measure(config: PipelineConfig, given: argparse.Namespace, asked: _Asked) -> None:
    server = PipelineServer([config], ServerSettings(port=0))
    loaded = threading.Event()
    # As omni serve does, in whose process nothing else runs either.
    server.on_loaded = partial(_note_loaded, loaded)
    http = HttpServer(server, bind(server.settings))
    port = http.listener.getsockname()[1]
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    while not loaded.wait(0.05):
        if server.failure is not None:
            raise server.failure
    omni = server.find(config.name).omni
    ask = _Asker(port, asked)
    with _apart(ask) if not given.together else nullcontext(partial(_run_clients, ask)) as clients:
        _Comparison(omni, ask, clients, given, thread).run()
        for concurrency in _CONCURRENCIES if asked.speaks else ():
            first = clients(_numbers(concurrency, 99), 1)
            print(f"first sound at {concurrency:2}: median {statistics.median(first):.3f} s")
    http.stop()
    thread.join()


def _note_loaded(loaded: threading.Event) -> None:
    keep_for_good()
    loaded.set()


_Clients = Callable[[Sequence[int], int], list[float]]
"""Ask these numbers at once, so many turns of each; seconds until the first sound, or token."""


def _run_clients(ask: _Asker, numbers: Sequence[int], turns: int) -> list[float]:
    return asyncio.run(_all(ask.one, numbers, turns))


async def _all(
    ask: Callable[[int], Awaitable[Any]], numbers: Sequence[int], turns: int
) -> list[Any]:
    """Clients that ask as soon as they are answered."""

    async def client(first: int) -> list[Any]:
        return [await ask(first + turn * len(numbers)) for turn in range(turns)]

    return list(chain.from_iterable(await asyncio.gather(*map(client, numbers))))


@contextmanager
def _apart(ask: _Asker) -> Iterator[_Clients]:
    """Clients in a process of their own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_orders, args=(ask, theirs), daemon=True)
    process.start()
    ours.recv()  # it has imported what it needs

    def clients(numbers: Sequence[int], turns: int) -> list[float]:
        ours.send((numbers, turns))
        answer: list[float] = ours.recv()
        return answer

    yield clients
    process.terminate()
    process.join()


def _serve_orders(ask: _Asker, orders: Connection) -> None:
    orders.send(None)
    while True:
        orders.send(_run_clients(ask, *orders.recv()))


class _Comparison:
    """Both ways in turns, each of them first every other time."""

    def __init__(
        self,
        omni: Omni,
        ask: _Asker,
        clients: _Clients,
        given: argparse.Namespace,
        server: threading.Thread,
    ) -> None:
        self._omni = omni
        self._ask = ask
        self._clients = clients
        self._num, self._turns, self._rounds = given.requests, given.turns, given.rounds
        self._times: list[float] = []
        self._server = Path(f"/proc/self/task/{server.native_id}/schedstat")
        self._ways: dict[str, Callable[[int], object]] = {
            "in one call": self._in_one_call,
            "in process": self._by_coroutines,
            "over HTTP": self._noting_times,
            "at its times": lambda number: asyncio.run(self._at_times(number)),
        }

    def run(self) -> None:
        """Measure and print."""
        seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in self._ways}
        names = list(self._ways)
        for number in range(-1, self._rounds):  # the first is for warming up
            for name in names if number % 2 else [*reversed(names[:-1]), names[-1]]:
                run = self._ways[name]
                with self._omni.paused() as pipeline:
                    for stage in pipeline.stages.values():
                        stage.reset_prefix_cache()
                before = self._clocks()
                run(number)
                if number >= 0:
                    took = zip(self._clocks(), before, strict=True)
                    seconds, cpu, server = (after - first for after, first in took)
                    seen[name].append((seconds, cpu, server))
        self._tell(seen)

    def _tell(self, seen: dict[str, list[tuple[float, float, float]]]) -> None:
        for name, each in seen.items():
            seconds, cpu, server = (statistics.median(kind) for kind in zip(*each, strict=True))
            count = self._num * self._turns
            print(
                f"{name:12}: median {seconds:.3f} s of {self._rounds}, {cpu:.3f} s of CPU, "
                f"the server's thread {1000 * server / count:.2f} ms a request"
            )
        for other in ("at its times", "in process", "in one call"):
            pairs = zip(seen["over HTTP"], seen[other], strict=True)
            costs = sorted(100 * (over[0] / within[0] - 1) for over, within in pairs)
            print(
                f"over HTTP it took {statistics.median(costs):.1f} % more than {other}, median of "
                f"the rounds' own ratios, which range from {costs[0]:.1f} to {costs[-1]:.1f}"
            )

    def _clocks(self) -> tuple[float, float, float]:
        """Seconds: of time, of CPU, and of CPU of the server's thread."""
        server = int(self._server.read_text().split()[0]) / 1e9
        return time.perf_counter(), time.process_time(), server

    def _in_one_call(self, number: int) -> object:
        numbers = _numbers(self._num * self._turns, number)
        return self._omni.generate(list(map(self._ask.request, numbers)))

    def _by_coroutines(self, number: int) -> object:
        async def ask(number: int) -> object:
            return await self._omni.agenerate(self._ask.request(number))

        return asyncio.run(_all(ask, _numbers(self._num, number), self._turns))

    def _noting_times(self, number: int) -> object:
        """Ask over HTTP, and note when each request came to the pipeline."""
        times: list[float] = []
        agenerate = self._omni.agenerate

        def noting(*given: Any, **options: Any) -> Awaitable[object]:
            times.append(time.perf_counter())
            return agenerate(*given, **options)

        with patch.object(self._omni, "agenerate", noting):
            self._clients(_numbers(self._num, number), self._turns)
        self._times = [each - times[0] for each in times]
        return times

    async def _at_times(self, number: int) -> None:
        async def ask(number: int, after: float) -> None:
            await asyncio.sleep(after)
            await self._omni.agenerate(self._ask.request(number))

        numbers = _numbers(self._num * self._turns, number)
        await asyncio.gather(*map(ask, numbers, self._times))


def _numbers(count: int, round_number: int) -> list[int]:
    return [10_000 * (round_number + 1) + each for each in range(count)]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked: of which model, for speech, by token ids."""

    model: str
    speaks: bool
    by_ids: bool


class _Asker:
    """Asks by plain sockets: a client library would cost more than the server."""

    def __init__(self, port: int, asked: _Asked) -> None:
        self._port = port
        self._model = asked.model
        self._speaks = asked.speaks
        self._by_ids = asked.by_ids

    def request(self, number: int) -> OmniRequest:
        """The same request for ``Omni``."""
        if self._speaks:
            return OmniRequest(ChatPrompt(tuple(self._messages(number))))
        if self._by_ids:
            return OmniRequest(TokensPrompt(tuple(self._ids(number))))
        return OmniRequest(TextPrompt(self._text(number)))

    async def one(self, number: int) -> float:
        """Ask once; seconds until the first sound, or the first token."""
        path = "/v1/completions"
        prompt = self._ids(number) if self._by_ids else self._text(number)
        body: dict[str, Any] = {"prompt": prompt}
        if self._speaks:
            path = "/v1/chat/completions"
            body = {"messages": self._messages(number), "modalities": ["text", "audio"]}
            body["audio"] = {"format": "pcm16"}
        content = json.dumps({"model": self._model, "stream": True, **body}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        began, first, mark = time.perf_counter(), 0.0, b'"data":"' if self._speaks else b"data: {"
        writer.write(head.encode() + content)
        answer = b""
        while chunk := await reader.read(1 << 16):
            answer += chunk
            if not first and mark in answer:
                first = time.perf_counter() - began
        writer.close()
        if b"[DONE]" not in answer:
            raise RuntimeError(f"the answer is not whole: {answer[-500:]!r}")
        return first

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
