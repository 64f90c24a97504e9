"""Finds a Ray cluster by its address, and checks within seconds that it answers.

Does not import Ray, because pipelines are checked where Ray is not installed, too.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

_CONNECT_TIMEOUT_S = 5.0
# Connection preface of an HTTP/2 client, and so of gRPC; the answer starts with a SETTINGS frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5)
_HEADER_BYTES = 9
_SETTINGS = 4


def find_cluster(address: str | None) -> str | None:
    """Resolve the address of a cluster.

    Args:
        address: ``host:port``; ``auto`` for the cluster that ``RAY_ADDRESS`` names or that ``ray
            start`` has started on this machine; None for the same, but optional.

    Returns:
        ``host:port`` of a cluster that answers; None if this process is already in a cluster, or
        one has to be started.

    Raises:
        ValueError: nothing answers there.
    """
    if address is not None and address != "auto":
        check_answers(address)
        return address
    if address is None and _is_in_cluster():
        return None
    named = os.environ.get("RAY_ADDRESS")
    if named:
        check_answers(named, "RAY_ADDRESS")
        return named
    started = _local_address()
    if started is not None:
        try:
            check_answers(started)
            return started
        except ValueError:  # it has ended, and left its file
            pass
    if address == "auto":
        raise ValueError(
            "runtime.address: no Ray cluster runs on this machine; leave the address out to start "
            "one"
        )
    return None


def check_answers(
    address: str, place: str = "runtime.address", timeout_s: float = _CONNECT_TIMEOUT_S
) -> None:
    """Check that what answers at ``host:port`` may be a Ray cluster.

    Raises:
        ValueError: nothing answers, or something else; the message begins with ``place``.
    """
    host, _, port = address.rpartition(":")
    try:
        if not host or not port.isdigit():
            raise ValueError("it is no host:port")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as sock:
            sock.sendall(_PREFACE)
            said = sock.recv(_HEADER_BYTES)
            if len(said) < 4 or said[3] != _SETTINGS:
                raise ValueError("what answers there is something else")
    except (OSError, ValueError) as error:
        reason = f"nothing in {timeout_s:g} s" if isinstance(error, TimeoutError) else error
        raise ValueError(
            f"{place}: no Ray cluster answers at {address!r}: {reason}; leave the address out to "
            "start one on this machine"
        ) from error


def _is_in_cluster() -> bool:
    """Return True if this process is in a cluster; Ray is imported only in that case."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _local_address() -> str | None:
    """Return the address that ``ray start`` has written to its file."""
    folder = os.environ.get("RAY_TMPDIR") or "/tmp"
    try:
        noted = Path(folder, "ray", "ray_current_cluster").read_text().strip()
    except (OSError, ValueError):
        return None
    return noted or None


_PROBE_TIMEOUT_S = 30.0
_PROBE = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


def check_is_ray(address: str, timeout_s: float = _PROBE_TIMEOUT_S) -> None:
    """Check that a Ray cluster answers, in a subprocess: Ray's ``init`` would retry for minutes.

    Raises:
        ValueError: it is no Ray cluster, or does not answer as one.
    """
    begin = f"a Ray cluster: {address!r} could not be joined: "
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{begin}what answers there did not say in {timeout_s:g} s that it is one"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        advice = "see RAY_AUTH_MODE and RAY_AUTH_TOKEN of Ray: " if "AuthToken" in lines[-1] else ""
        raise ValueError(f"{begin}{advice}{lines[-1]}")
