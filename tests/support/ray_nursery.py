"""Forks Ray's processes from one that has imported what the tests' actors need; a program.

    python -m tests.support.ray_nursery ADDRESS

Each actor has a process, which would otherwise import torch, transformers and the engine: some
four seconds of a processor, thirty times in a run of the tests. ::

    raylet ── "python" setup_worker.py ... ──► client ── what, where, 0, 1, 2 ──► nursery
                                                 │                                   │ fork
                                                 │ ◄───── its end ───── worker ◄─────┘

The client lives as long as its worker. Anything else that a cluster starts by that program starts
as usual. Actors that start from nothing are tested in the clusters of ``omni run``.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from engine.models.registry import FAMILIES
from tests.support.ray_nursery_client import NUM_FDS

_IMPORTED_FIRST = (
    "engine.encoder.encoder_engine",
    "engine.generator.generator_engine",
    "engine.llm.llm_engine",
    "stages.worker.stage_worker",
    "tests.support.fake_speech_kind",
)
_SET_PARENT_DEATH_SIGNAL = 1


def main(address: str) -> None:
    """Serve clients at an address; in every fork, run what its client asked for."""
    for name in _IMPORTED_FIRST:
        importlib.import_module(name)
    for row in FAMILIES.rows.values():
        row.load()
    assert "ray" not in sys.modules, "it has read this process's environment"
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    gc.collect()
    gc.freeze()
    asked, fds = _Nursery(address).serve()
    _become(asked, fds)


class _Nursery:
    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{address}.new")
        self._listener.listen(64)
        os.rename(f"{address}.new", address)  # visible only once it accepts connections
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self) -> tuple[Any, list[int]]:
        """Fork for each client; returns in the forks, with the client's request and descriptors."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._listener:
                    key.data()
                    break  # it may have removed the folder
                client, _ = self._listener.accept()
                _, fds, _, _ = socket.recv_fds(client, 1, NUM_FDS)
                with client.makefile("rb") as lines:
                    line = lines.readline()
                if not line:  # the client was killed meanwhile
                    client.close()
                    continue
                pid = os.fork()
                if not pid:
                    client.detach()
                    self._leave_all_behind()
                    return json.loads(line), fds
                self._watch(client, pid)
                for fd in fds:
                    os.close(fd)

    def _leave_all_behind(self) -> None:
        """Detach these objects: their descriptors are closed with all others, and only once."""
        for key in self._selector.get_map().values():
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.detach()
        self._selector.close()

    def _watch(self, client: socket.socket, pid: int) -> None:
        """End one of them when the other ends."""
        process = os.pidfd_open(pid)

        def kill() -> None:
            self._selector.unregister(client)
            client.close()
            signal.pidfd_send_signal(process, signal.SIGKILL)

        def tell() -> None:
            _, status = os.waitpid(pid, 0)
            self._selector.unregister(process)
            os.close(process)
            if client.fileno() >= 0:
                self._selector.unregister(client)
                with suppress(OSError), client:
                    client.sendall(str(os.waitstatus_to_exitcode(status)).encode())

        self._selector.register(client, selectors.EVENT_READ, kill)
        self._selector.register(process, selectors.EVENT_READ, tell)


def _become(asked: Any, fds: list[int]) -> None:
    """Run a client's program in its environment, no longer than the nursery lives."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    os.setpgid(0, 0)  # Ray ends a worker's whole group, which may not be the nursery's
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.closerange(NUM_FDS, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    # Reads its worker's environment when it is imported.
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._private.workers import setup_worker

    options, arguments = setup_worker.parser.parse_known_args(asked["arguments"][1:])
    update_envs(RuntimeEnvContext.deserialize(options.serialized_runtime_env_context).env_vars)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = dict.fromkeys([*filter(None, paths), *sys.path])
    sys.argv[:] = arguments
    random.seed()
    np.random.seed()
    torch.seed()
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
