"""Cost of sending a tensor to another process: a channel compared with pickling queues.

    python benchmarks/tensor_hop.py [--mib 1,16] [--rounds 200] [--warm 20]

A hop is the time from the call that sends a stage's output with one float32 tensor to the moment at
which the other process has read its first and last value. Both use the same clock, which all
processes of a machine share. The other process frees each tensor before the next arrives.

- ``channel``: :class:`stages.remote.channel.Channel`, the tensor in shared memory.
- ``queue``: ``multiprocessing.Queue``, the tensor as an array of numpy, pickled.
- ``pipe``: ``multiprocessing.Pipe``, the same without the queue's thread and lock.

Goals: 1 ms at 1 MiB, and 5 ms at 16 MiB, in the median, on an idle machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from stages.remote.channel import Channel
from stages.remote.fork_server import shut_down, start_worker
from stages.stage_output import StageOutput

GOALS_MS = {1: 1.0, 16: 5.0}


def receive_from_channel(sock: socket.socket, argument: bytes) -> None:
    """In the other process: report the arrival time of each output."""
    ended = threading.Event()
    channel = Channel(sock, StageOutput, "sender")

    def on_message(output: StageOutput) -> None:
        rows = output.tensors["rows"]
        told = (float(rows[0]), float(rows[-1]))
        channel.send((time.perf_counter(), *told))

    channel.start(on_message, lambda reason: ended.set())
    ended.wait()


def receive_from_queue(tensors: Any, answers: Any) -> None:
    """In the other process: the same, from a queue."""
    while (rows := tensors.get()) is not None:
        told = (float(rows[0]), float(rows[-1]))
        answers.put((time.perf_counter(), *told))


def receive_from_pipe(connection: Any) -> None:
    """In the other process: the same, from a pipe."""
    while (rows := connection.recv()) is not None:
        told = (float(rows[0]), float(rows[-1]))
        connection.send((time.perf_counter(), *told))


Hop = Callable[[torch.Tensor], tuple[float, float, float]]
"""Sends a tensor; returns its arrival time, and its first and last value as received."""


def over_channel() -> tuple[Hop, Callable[[], None]]:
    worker = start_worker(f"{module()}:receive_from_channel", b"", threads=1, name="receiver")
    answers: queue.SimpleQueue[tuple[float, float, float]] = queue.SimpleQueue()
    channel = Channel(worker.sock, tuple[float, float, float], "receiver")
    channel.start(answers.put, lambda reason: None)

    def hop(rows: torch.Tensor) -> tuple[float, float, float]:
        channel.send(StageOutput("request", "stage", True, tensors={"rows": rows}))
        return answers.get()

    def close() -> None:
        channel.close()
        channel.join(10.0)
        shut_down()

    return hop, close


def module() -> str:
    """Return this file's module name in another process: the folder of a script is on its path."""
    if __name__ != "__main__":
        return __name__
    spec = globals().get("__spec__")  # of ``python -m``; None for a script
    return "tensor_hop" if spec is None else str(spec.name)


def over_queue() -> tuple[Hop, Callable[[], None]]:
    context = multiprocessing.get_context("spawn")
    tensors, answers = context.Queue(), context.Queue()
    process = context.Process(target=receive_from_queue, args=(tensors, answers), daemon=True)
    process.start()

    def hop(rows: torch.Tensor) -> tuple[float, float, float]:
        tensors.put(rows.numpy())
        answer: tuple[float, float, float] = answers.get()
        return answer

    def close() -> None:
        tensors.put(None)
        process.join()

    return hop, close


def over_pipe() -> tuple[Hop, Callable[[], None]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive_from_pipe, args=(theirs,), daemon=True)
    process.start()

    def hop(rows: torch.Tensor) -> tuple[float, float, float]:
        ours.send(rows.numpy())
        answer: tuple[float, float, float] = ours.recv()
        return answer

    def close() -> None:
        ours.send(None)
        process.join()

    return hop, close


WAYS = {"channel": over_channel, "queue": over_queue, "pipe": over_pipe}


def measure(hop: Hop, mib: int, rounds: int, warm: int) -> list[float]:
    """Measure milliseconds of each round."""
    times = []
    for number in range(warm + rounds):
        rows = torch.full((mib * 2**18,), float(number))
        began = time.perf_counter()
        there, first, last = hop(rows)
        assert first == last == number
        times.append((there - began) * 1e3)
    return times[warm:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", default="1,16")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--warm", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("MiB", "way", "median ms", "worst ms", "goal ms")
    for mib in map(int, arguments.mib.split(",")):
        for name, way in WAYS.items():
            hop, close = way()
            times = measure(hop, mib, arguments.rounds, arguments.warm)
            close()
            goal = f"{GOALS_MS[mib]:g}" if name == "channel" and mib in GOALS_MS else ""
            median, worst = statistics.median(times), max(times)
            table.add_row(str(mib), name, f"{median:.3f}", f"{worst:.3f}", goal)
    Console().print(table)


if __name__ == "__main__":
    main()
