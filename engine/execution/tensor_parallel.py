"""Tensor parallelism: several processes compute one model, each its shard of every layer.

The first process is the leader::

    leader       schedule ─► tables ─► forward ─► sample ─► rows and tokens
                               │          ║ all-reduce after every attention and MLP
    followers                  └► Step ─► forward, over their own heads and pages

A follower has no requests. It repeats the leader's page operations in the same order, so page ids
refer to the same tokens in all processes, and decisions of the scheduler and the prefix cache apply
to all. Messages are sent through a follower's standard input; device tensors are sent through the
process group.

A process that leaves a step in the middle would leave the others in an all-reduce that never ends.
So an interrupted step kills the followers and breaks the engine, as does the exit of a follower:
the next message then fails, and on a CPU the next all-reduce. Followers exit when their standard
input is closed.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import FileStore, ProcessGroupGloo

from engine.execution.input_batch import ModelInputs
from engine.interface.ownership import renew_in_forks
from engine.interface.placed_error import described
from engine.layers import WHOLE, Shards
from prefix_cache import KVCacheConfig, PageCopy, PagedMemory

# A live process is waited for, because it may compute, or be stopped, for any length of time.
_JOIN_TIMEOUT: Final = timedelta(minutes=10)
_GROUP_TIMEOUT: Final = timedelta(days=365)


class FollowerSetup(msgspec.Struct, frozen=True):
    """First message: the engine's ``EngineConfig`` as JSON, and the rendezvous folder."""

    config: str
    rank: int
    size: int
    folder: str
    num_threads: int


class FollowerPages(msgspec.Struct, frozen=True):
    """Second message: the number of (large) pages to allocate."""

    num_pages: int


class StepMessage(msgspec.Struct, frozen=True, tag="step"):
    """Run the model on arrays (dtype, shape, bytes), by the names of ``ModelInputs.arrays``.

    Embeddings of the given width follow through the process group, then the items' features for
    deeper layers, if their width is not 0.
    """

    arrays: dict[str, tuple[str, tuple[int, ...], bytes]]
    width: int
    features_width: int

    def unpacked(self) -> dict[str, NDArray[Any]]:
        """Return the arrays as numpy arrays."""
        return {
            name: np.frombuffer(bytearray(content), dtype).reshape(shape)
            for name, (dtype, shape, content) in self.arrays.items()
        }


class CopyMessage(msgspec.Struct, frozen=True, tag="copy"):
    """Copy pages within the pool."""

    group_id: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class ClearMessage(msgspec.Struct, frozen=True, tag="clear"):
    """Fill a page with zeros; the null page if there is no group."""

    group_id: int | None = None
    page_id: int = 0


class CheckMessage(msgspec.Struct, frozen=True, tag="check"):
    """All-reduce whether anything in pages, given as (group, id), is not finite."""

    pages: tuple[tuple[int, int], ...]


FollowerMessage: TypeAlias = StepMessage | CopyMessage | ClearMessage | CheckMessage


def read_message(pipe: IO[bytes], kind: Any) -> Any:
    """Read the next message, which must be of a kind. ``EOFError`` if the pipe is closed."""
    size = pipe.read(8)
    content = pipe.read(int.from_bytes(size, "little")) if len(size) == 8 else b""
    if not content:
        raise EOFError("the leading process has closed the pipe")
    return msgspec.msgpack.decode(content, type=kind)


def join_group(folder: str, rank: int, size: int, device: torch.device) -> Shards:
    """Join the process group through a private folder; CPU processes communicate over loopback.

    Raises:
        RuntimeError: if the other processes do not join in time.
    """
    store = FileStore(str(Path(folder, "store")), size)
    group: ProcessGroupGloo | torch.distributed.ProcessGroupNCCL
    if device.type == "cuda":
        nccl = torch.distributed.ProcessGroupNCCL
        group = nccl(store, rank, size, nccl.Options())
    else:
        options = ProcessGroupGloo._Options()
        options._timeout = _JOIN_TIMEOUT
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(_GROUP_TIMEOUT)
    return Shards(rank, size, group)


class FollowerError(RuntimeError):
    """A follower could not be started, or has exited."""


_PROGRAM = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
sys.path[:] = json.loads(sys.argv[1])
from engine.llm.follower import main
sys.exit(main(answers))
"""


class Followers:
    """Leader's handle of the processes that compute the other shards.

    Args:
        config_of: returns the engine settings of a rank, as JSON.

    Raises:
        FollowerError: if one of them does not start; its output is on standard error.

    Attributes:
        shards: the leader's shards.
    """

    def __init__(self, size: int, config_of: Callable[[int], str], device: torch.device) -> None:
        self._device, self._exit_cause, self.shards = device, "", WHOLE
        folder = tempfile.mkdtemp(prefix="omni-shards-")
        program = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)]
        self._processes = [
            subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # so that terminal signals do not reach it
            )
            for _ in range(1, size)
        ]
        self.close = weakref.finalize(self, _end, self._processes, folder)
        num_threads = torch.get_num_threads()
        renew_in_forks(self)
        with self.together():
            for rank, process in enumerate(self._processes, 1):
                setup = FollowerSetup(config_of(rank), rank, size, folder, num_threads)
                _write(process, msgspec.msgpack.encode(setup))
            self.await_all("started")
            self.shards = join_group(folder, 0, size, device)

    def renew_locks(self) -> None:
        """Leave the processes to the parent, in a forked child."""
        self.close.detach()
        # The group's destructor would wait for threads that only the parent has.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.shards.group))

    @property
    def is_closed(self) -> bool:
        """True if the processes have been killed."""
        return not self.close.alive

    def await_all(self, answer: str) -> None:
        """Wait for ``answer`` from each process. ``FollowerError`` if one sends another or none."""
        with self.together():
            for process in self._processes:
                assert process.stdout is not None
                line = process.stdout.readline().decode().strip()
                if line != answer:
                    line = line or "it ended; see standard error"
                    raise FollowerError(f"a process of tensor_parallel: {line}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of a joint operation: kills the followers if it is interrupted."""
        try:
            yield
        except BaseException as error:
            self._exit_cause = self._exit_cause or described(error)
            self.close()
            raise

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to every follower, which processes messages in order.

        Raises:
            FollowerError: if one of them has exited; the others are then killed.
        """
        if self.is_closed:
            raise FollowerError(f"the processes of tensor_parallel have ended: {self._exit_cause}")
        content = msgspec.msgpack.encode(message)
        with self.together():
            for process in self._processes:
                _write(process, content)

    def send_step(self, inputs: ModelInputs) -> None:
        """Make every follower run the model; the caller must do so immediately."""
        features = inputs.step.item_features
        arrays = {
            name: (array.dtype.str, array.shape, array.tobytes())
            for name, array in inputs.arrays.items()
        }
        width = inputs.embeds.shape[1]
        self.send(StepMessage(arrays, width, 0 if features is None else features.shape[1]))
        self.shards.broadcast(inputs.embeds)
        if features is not None:
            self.shards.broadcast(features)

    def are_finite(self, pages: Sequence[tuple[int, int]], mine: bool) -> bool:
        """Return True if pages are finite in all processes; ``mine`` is this one's result."""
        with self.together():
            self.send(CheckMessage(tuple(pages)))
            bad = torch.tensor([0.0 if mine else 1.0], device=self._device)
            return self.shards.add_up(bad).item() == 0


def _write(process: subprocess.Popen[bytes], content: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(len(content).to_bytes(8, "little") + content)
        process.stdin.flush()
    except BrokenPipeError as error:
        raise FollowerError(
            f"a process of tensor_parallel has ended, with status {process.wait()}"
        ) from error


def _end(processes: Sequence[subprocess.Popen[bytes]], folder: str) -> None:
    for process in processes:
        process.kill()  # it has nothing to save, and may be in an all-reduce that never ends
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
    shutil.rmtree(folder, ignore_errors=True)


class LeaderMemory(PagedMemory):
    """Pages of the leader; operations on them are repeated by the followers."""

    def __init__(self, config: KVCacheConfig, device: torch.device, followers: Followers) -> None:
        super().__init__(config, device)
        self.followers = followers

    def clear_page(self, group_id: int, page_id: int) -> None:
        """See :meth:`PagedMemory.clear_page`."""
        self.followers.send(ClearMessage(group_id, page_id))
        super().clear_page(group_id, page_id)

    def clear_null_page(self) -> None:
        """See :meth:`PagedMemory.clear_null_page`."""
        self.followers.send(ClearMessage())
        super().clear_null_page()

    def copy_pages(self, copy: PageCopy, target: PagedMemory) -> None:
        """See :meth:`PagedMemory.copy_pages`; the target is this memory."""
        self.followers.send(CopyMessage(copy.group_id, copy.sources, copy.targets))
        super().copy_pages(copy, target)


def followers_of(memory: PagedMemory) -> Followers | None:
    """Return the followers with the other heads of these pages; None if all heads are here."""
    return memory.followers if isinstance(memory, LeaderMemory) else None
