"""What a zygote is told, and what it tells: which worker to fork, and what became of one."""

from __future__ import annotations

import os
import signal

import msgspec

__all__ = ["Exited", "StartOrder", "Started", "exit_reason"]


class StartOrder(msgspec.Struct, frozen=True):
    """Fork a worker. With it come descriptors: its socket, its stdout, its stderr.

    Attributes:
        number: tells this worker from all others of the zygote.
        target: ``"package.module:function"``, called with the socket and the argument.
        argument: for the function.
        threads: of torch.
        name: what the process is called.
        environment: all of its variables.
        folder: its working directory; None leaves the zygote's.
        import_path: its ``sys.path``, in the encoding of the file system.
    """

    number: int
    target: str
    argument: bytes
    threads: int
    name: str
    environment: list[tuple[bytes, bytes]]
    folder: bytes | None
    import_path: list[bytes]


class Started(msgspec.Struct, frozen=True):
    """A worker was forked. With it may come a descriptor of the process.

    Attributes:
        number: of the order.
        pid: of the worker.
        error: why there is none.
    """

    number: int
    pid: int
    error: str | None = None


class Exited(msgspec.Struct, frozen=True):
    """A worker is gone.

    Attributes:
        number: of its order.
        status: as ``os.waitpid`` tells it.
    """

    number: int
    status: int


def exit_reason(status: int) -> str:
    """What a process died of, in words that go on after its name: ``"was killed by SIGKILL"``.

    Args:
        status: as ``os.waitpid`` tells it.
    """
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
