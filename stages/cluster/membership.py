"""This process's connection to a Ray cluster: joins one, or starts its own."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import ray

from engine.interface.placed_error import described
from stages.cluster.cluster_address import check_is_ray
from stages.cluster.object_bytes import HeldObjects

_JOIN_TIMEOUT_S = 120.0
_LEAVE_TIMEOUT_S = 60.0
_MIN_STORE_BYTES, _MAX_STORE_BYTES = 80 * 2**20, 8 * 2**30
"""Minimum that Ray accepts, and a maximum above what rows in transit ever need."""

_LOGICAL_CPUS = 1024
"""CPUs of a cluster that only this process uses: reserving them excludes no other program."""

_OWN_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment of an own cluster: sends no usage data, and starts only the needed processes."""

_SET_BY_RAY = ("RAY_AUTH_MODE",)

_TOKEN = secrets.token_hex(32)
"""Authentication token of an own cluster, which is in no file, so that no other program has it."""

_RAY_SIGNALS = (
    signal.SIGSEGV,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGABRT,
    signal.SIGTERM,
    signal.SIGBUS,
    signal.SIGTRAP,
)
_SIGACTION_BYTES = 1024
"""Upper bound of the size of ``struct sigaction`` on any system."""

_REMOVER = 'cat; for _ in 1 2 3 4 5; do sleep 2; rm -rf "$0"; [ -e "$0" ] || exit; done'
"""Script that waits until the process that started it ends in any way, then removes a folder."""


def join(address: str | None) -> Membership:
    """Join a cluster, or start one for this process alone.

    A process is in one cluster at a time: if it is already in one, that one is used.

    Args:
        address: ``host:port`` of a cluster that this machine is a node of; None starts one.

    Raises:
        ValueError: it cannot be joined, this process is in another one, or none can be started.
    """
    global _CONNECTION
    with _LOCK:
        if _CONNECTION is not None and not (_CONNECTION.num_members and ray.is_initialized()):
            _CONNECTION = None
        if _CONNECTION is None:
            _CONNECTION = Membership(address)
        else:
            _check_same(address)
        _CONNECTION.num_members += 1
        return _CONNECTION


def _check_same(address: str | None) -> None:
    """Refuse an address that, judging by its text, is not that of this process's cluster."""
    if address is None:
        return
    there = str(ray.get_runtime_context().gcs_address)
    (host, _, port), (other_host, _, other_port) = address.rpartition(":"), there.rpartition(":")
    own = {"localhost", "127.0.0.1", ray.util.get_node_ip_address()}
    if port != other_port or (host != other_host and not {host, other_host} <= own):
        raise ValueError(
            f"runtime.address: {address!r} was asked for, but this process is in the Ray cluster "
            f"at {there!r}, and can be in one only"
        )


class Membership:
    """This process's connection to a cluster; each call of :func:`join` needs one :meth:`leave`.

    Created by Ray's ``init`` in a thread that stays alive, or an existing one made by the program.

    Linux kills the processes of a cluster when the *thread* that started them ends.
    """

    def __init__(self, address: str | None) -> None:
        self.num_members = 0
        self.held = HeldObjects()
        self._has_ended = False
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        if ray.is_initialized():  # by the user of this library; it stays initialized
            _check_same(address)
            return
        if address is not None:
            check_is_ray(address)
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(address,), name="ray cluster", daemon=True
        )
        self._thread.start()
        what = "none could be started" if address is None else f"{address!r} could not be joined"
        if not self._ready.wait(_JOIN_TIMEOUT_S):
            self._leaving.set()
            raise ValueError(f"a Ray cluster: {what} within {_JOIN_TIMEOUT_S:g} s")
        if self._error is not None:
            raise ValueError(f"a Ray cluster: {what}: {_describe(self._error)}") from self._error
        atexit.register(self._end)

    def leave(self) -> None:
        """Leave; the last member disconnects, and ends a cluster that was started by it."""
        with _LOCK:
            self.num_members -= 1
            if not self.num_members:
                self._end()

    def _end(self) -> None:
        if self._has_ended or os.getpid() != _PID:
            return
        self._has_ended = True
        atexit.unregister(self._end)
        try:
            if ray.is_initialized():
                self.held.bring_home()
        finally:  # not earlier: fetching an object after that would start another cluster
            self._leaving.set()
        if self._thread is not None:
            self._thread.join(_LEAVE_TIMEOUT_S)

    def _run(self, address: str | None) -> None:
        folder = None if address is not None else _new_folder()
        remover = None if folder is None else _start_remover(folder)
        try:
            try:
                _connect(address, folder)
            except BaseException as error:  # raised again by the waiting thread
                self._error = error
            finally:
                self._ready.set()
            if self._error is None:
                self._leaving.wait()
            with _keep_signals():
                ray.shutdown()
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if remover is not None:
                _stop(remover)


_LOCK = threading.RLock()
_CONNECTION: Membership | None = None
_PID = os.getpid()


def _connect(address: str | None, folder: str | None) -> None:
    common: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
    ours = {} if address is not None else _OWN_ENVIRONMENT | {"RAY_AUTH_TOKEN": _TOKEN}
    with _environment(ours), _quiet_log(), _keep_signals():
        if address is not None:
            ray.init(address=address, **common)
        else:
            ray.init(
                address="local",
                num_cpus=_LOGICAL_CPUS,
                include_dashboard=False,
                object_store_memory=_store_bytes(),
                _temp_dir=folder,
                _node_ip_address="127.0.0.1",
                **common,
            )


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes started within, unless the user has set them."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in values.items() if name not in before})
    try:
        yield
    finally:
        for name in {*values, *_SET_BY_RAY} - before.keys():
            os.environ.pop(name, None)


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Restrict Ray's log to errors.

    In a connection of this library, Ray's prints to stdout are disabled for good: they report every
    death of an actor at length, which the log of this library does in a line.
    """
    vars(ray._private.worker)["_worker_logs_enabled"] = False
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _keep_signals() -> Iterator[None]:
    """Restore signal handlers afterwards: Ray replaces them to print its threads' stacks.

    Uses libc, because Python sets handlers only in the main thread, which this one may not be.
    """
    library = ctypes.CDLL(None)
    kept = {number: ctypes.create_string_buffer(_SIGACTION_BYTES) for number in _RAY_SIGNALS}
    for number, action in kept.items():
        library.sigaction(int(number), None, action)
    try:
        yield
    finally:
        for number, action in kept.items():
            library.sigaction(int(number), action, None)


def _store_bytes() -> int:
    """Return a quarter of the free memory, limited by the free space of shared memory."""
    free: int = psutil.virtual_memory().available // 4
    with_room = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    if with_room is not None:
        free = min(free, with_room.f_bavail * with_room.f_frsize * 4 // 5)
    return max(_MIN_STORE_BYTES, min(_MAX_STORE_BYTES, free))


def _new_folder() -> str:
    """Create a folder for sockets and logs of a cluster. A socket's path has at most 107 bytes."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="omni-ray-", dir=parent if len(parent) < 24 else "/tmp")


def _start_remover(folder: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _REMOVER, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def _stop(remover: subprocess.Popen[bytes]) -> None:
    """Kill the remover, whose folder is already gone."""
    os.killpg(remover.pid, signal.SIGKILL)
    assert remover.stdin is not None
    remover.stdin.close()
    remover.wait()


def _describe(error: BaseException) -> str:
    explained = described(error)
    if "AuthenticationError" in type(error).__name__:
        return f"{explained}; see RAY_AUTH_TOKEN of Ray"
    return explained
