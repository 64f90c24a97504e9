"""Functions that workers run in tests."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time

import numpy as np
import torch

from stages.remote.channel import Channel
from stages.stage_output import StageOutput
from tests.support.notes import Note


def echo(sock: socket.socket, argument: bytes) -> None:
    """Send the argument and then everything received, until the end."""
    sock.sendall(argument)
    while content := sock.recv(4096):
        sock.sendall(content)


def describe(sock: socket.socket, argument: bytes) -> None:
    """Send the properties of the process as JSON; end on request."""
    reported = {
        "fds": {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]},
        "threads": torch.get_num_threads(),
        "python_threads": threading.active_count(),
        "random": [random.random(), float(np.random.rand()), torch.rand(1).item()],
        "folder": os.getcwd(),
        "path": sys.path,
        "argv": sys.argv,
        "environment": dict(os.environ),
        "interrupt_is_ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "cuda": torch.cuda.is_initialized(),
        "main": sys.modules["__main__"].__dict__.get("__file__"),
    }
    print(argument.decode())
    sock.sendall(json.dumps(reported).encode())
    sock.shutdown(socket.SHUT_WR)
    sock.recv(1)


def exit_with(sock: socket.socket, argument: bytes) -> None:
    """Exit with a status."""
    sys.exit(int(argument))


def raise_an_error(sock: socket.socket, argument: bytes) -> None:
    """Exit with an error."""
    raise KeyError(argument.decode())


def hold_on(sock: socket.socket, argument: bytes) -> None:
    """Ignore everything short of being killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock.sendall(b"held")
    while True:
        time.sleep(1000)


def send_back(sock: socket.socket, argument: bytes) -> None:
    """Return outputs with their rows and one more; answer "hold" with rows of sevens."""
    ended = threading.Event()
    channel = Channel(sock, Note, "parent")

    def answer(note: Note) -> None:
        outputs = note.outputs
        rows = outputs[0].tensors["rows"] + 1 if outputs else torch.full((200, 200), 7)
        channel.send(Note(outputs=(StageOutput("r", "s", True, tensors={"rows": rows}),)))

    channel.start(answer, lambda reason: ended.set())
    ended.wait()
