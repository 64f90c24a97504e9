"""Whether what answers at an address is a Ray cluster that lets this process in."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["check_is_ray"]

_ANSWER_S = 30.0
_PROBE = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


def check_is_ray(address: str, patience_s: float = _ANSWER_S) -> None:
    """Ask a cluster who it is, in a process of its own.

    Ray's ``init`` asks again and again, for minutes, what will never answer, and a process that has
    asked cannot take it back; nor is what it prints meanwhile anybody's to read.

    Args:
        address: ``host:port``, where something answers as Ray does.
        patience_s: seconds to wait for an answer.

    Raises:
        ValueError: it does not say who it is.
    """
    begin = f"a Ray cluster: {address!r} could not be joined: "
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patience_s,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{begin}what answers there did not say in {patience_s:g} s that it is one"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        told = "see RAY_AUTH_MODE and RAY_AUTH_TOKEN of Ray: " if "AuthToken" in lines[-1] else ""
        raise ValueError(f"{begin}{told}{lines[-1]}")
