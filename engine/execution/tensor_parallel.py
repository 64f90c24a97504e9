"""Several processes compute one model, each its share of every layer; the first one leads.

::

    leader       schedule ─► tables ─► forward ─► sample ─► rows and tokens
                               │          ║ sums behind every attention and MLP
    followers                  └► Step ─► forward, over heads and pages of their own

A follower knows no requests. It repeats what the leader does to its pages, in the same order, so
that the same ids stand for the same tokens in all processes: whatever the scheduler and the prefix
cache decide holds for all. Messages go through a follower's standard input; what is on the device
goes the way of the sums.

A process that leaves a step in the middle leaves the others in a sum that never ends. So an
interrupted step ends the followers, and the engine is broken, as it is when a follower has ended:
the next message is an error then, and on a CPU the next sum. Followers end when their standard
input does.
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

# One that is alive is waited for: it may compute, or be stopped, for any time.
_MEETING: Final = timedelta(minutes=10)
_PATIENCE: Final = timedelta(days=365)


class FollowerSetup(msgspec.Struct, frozen=True):
    """The first message: what to build, an ``EngineConfig`` as JSON, and where to meet."""

    config: str
    rank: int
    size: int
    folder: str
    num_threads: int


class FollowerPages(msgspec.Struct, frozen=True):
    """The second: how many (large) pages to hold."""

    num_pages: int


class StepMessage(msgspec.Struct, frozen=True, tag="step"):
    """Run the model on these arrays (type, shape, bytes), by the names of ``ModelInputs.arrays``.

    Embeddings, of a width, follow through the group, and what items have for further layers, if
    that is wider than 0.
    """

    arrays: dict[str, tuple[str, tuple[int, ...], bytes]]
    width: int
    features_width: int

    def unpacked(self) -> dict[str, NDArray[Any]]:
        """The arrays."""
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
    """Fill a page with zeros; without a group the null page."""

    group_id: int | None = None
    page_id: int = 0


class CheckMessage(msgspec.Struct, frozen=True, tag="check"):
    """Add up whether anything in pages, each a group and an id, is not finite."""

    pages: tuple[tuple[int, int], ...]


FollowerMessage: TypeAlias = StepMessage | CopyMessage | ClearMessage | CheckMessage


def read_message(pipe: IO[bytes], kind: Any) -> Any:
    """The next message, which is of a kind; ``EOFError`` where there is none."""
    size = pipe.read(8)
    content = pipe.read(int.from_bytes(size, "little")) if len(size) == 8 else b""
    if not content:
        raise EOFError("the leading process has closed the pipe")
    return msgspec.msgpack.decode(content, type=kind)


def join_group(folder: str, rank: int, size: int, device: torch.device) -> Shards:
    """Meet the other processes in a folder of their own; on a CPU they talk over loopback.

    Raises:
        RuntimeError: they do not come.
    """
    store = FileStore(str(Path(folder, "store")), size)
    group: ProcessGroupGloo | torch.distributed.ProcessGroupNCCL
    if device.type == "cuda":
        nccl = torch.distributed.ProcessGroupNCCL
        group = nccl(store, rank, size, nccl.Options())
    else:
        options = ProcessGroupGloo._Options()
        options._timeout = _MEETING
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(_PATIENCE)
    return Shards(rank, size, group)


class FollowerError(RuntimeError):
    """A follower could not be started, or has ended."""


_PROGRAM = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
sys.path[:] = json.loads(sys.argv[1])
from engine.llm.follower import main
sys.exit(main(answers))
"""


class Followers:
    """The processes that compute the other shares, as the leader sees them.

    Args:
        config_of: from a rank to the settings of its engine, as JSON.

    Raises:
        FollowerError: one of them does not start; what it printed is on standard error.

    Attributes:
        shards: the leader's.
    """

    def __init__(self, size: int, config_of: Callable[[int], str], device: torch.device) -> None:
        self._device, self._ended_by, self.shards = device, "", WHOLE
        folder = tempfile.mkdtemp(prefix="omni-shards-")
        program = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)]
        self._processes = [
            subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # signals of the terminal are not for it
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
        """Leave the processes to the parent, in a child of a fork."""
        self.close.detach()
        # Its destructor would wait for threads that only the parent has.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.shards.group))

    @property
    def is_closed(self) -> bool:
        """Whether the processes have been ended."""
        return not self.close.alive

    def await_all(self, answer: str) -> None:
        """Wait for an answer of each; ``FollowerError`` where another comes, or none."""
        with self.together():
            for process in self._processes:
                assert process.stdout is not None
                line = process.stdout.readline().decode().strip()
                if line != answer:
                    line = line or "it ended; see standard error"
                    raise FollowerError(f"a process of tensor_parallel: {line}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """What others take part in: they are ended if it is interrupted."""
        try:
            yield
        except BaseException as error:
            self._ended_by = self._ended_by or described(error)
            self.close()
            raise

    def send(self, message: msgspec.Struct) -> None:
        """Have every follower do something, after all that it was sent before.

        Raises:
            FollowerError: one of them has ended, which ends the others.
        """
        if self.is_closed:
            raise FollowerError(f"the processes of tensor_parallel have ended: {self._ended_by}")
        content = msgspec.msgpack.encode(message)
        with self.together():
            for process in self._processes:
                _write(process, content)

    def send_step(self, inputs: ModelInputs) -> None:
        """Have every follower run the model; the caller does so at once."""
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
        """Whether pages are finite in all processes, where they are in this one."""
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
        process.kill()  # it keeps nothing, and may be in a sum that does not end
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
    shutil.rmtree(folder, ignore_errors=True)


class LeaderMemory(PagedMemory):
    """Pages of the leader: what is done to them, followers do to theirs."""

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
    """Who has the other heads of these pages; None where all are here."""
    return memory.followers if isinstance(memory, LeaderMemory) else None
