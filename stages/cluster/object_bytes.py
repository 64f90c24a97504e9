"""Bytes in Ray's object store."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.cluster.direct_transport import fetch, fetch_home, forget_borrowed, is_direct
from stages.remote.codec import Decoder, Reference, plain_bytes
from stages.remote.shared_memory import RemoteBytes

_FETCH_TIMEOUT_S = 10.0
"""Timeout of fetching from an actor that may hang, in the process that would end it."""


class _Writable:
    """View of a read-only array that claims to be writable, as torch requires; never written to."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self._content = content
        self.__array_interface__ = {
            "data": (content.ctypes.data, False),
            "shape": content.shape,
            "typestr": "|u1",
            "version": 3,
        }


class ObjectBytes(RemoteBytes):
    """A reference to an object, which stays in the store, or in its actor, while referenced.

    Args:
        reference: Ray's reference to an array or tensor, ``(nbytes,)`` of uint8.
        held: the held objects of a process that may leave the cluster while its users keep
            outputs: it copies what it reads, out of a store that must not fill up. None in a
            worker, which reads in place.
    """

    def __init__(self, reference: Any, nbytes: int, held: HeldObjects | None = None) -> None:
        self.nbytes = nbytes
        self.reference = reference
        self._copies = held is not None
        self._content: NDArray[np.uint8] | Tensor | None = None
        self._why_lost = "the cluster was left"
        self.is_direct = is_direct(reference)
        if self.is_direct:
            weakref.finalize(self, forget_borrowed, reference.hex()).atexit = False
        self._lock = threading.Lock()
        if held is not None:
            held.add(self)

    def array(self) -> NDArray[np.uint8]:
        """See :class:`~stages.remote.shared_memory.RemoteBytes`."""
        return plain_bytes(self._found())

    def tensor(self) -> Tensor:
        """See :class:`~stages.remote.shared_memory.RemoteBytes`."""
        found = self._found()
        return found if isinstance(found, Tensor) else torch.from_numpy(found)

    def _found(self) -> NDArray[np.uint8] | Tensor:
        """Return the bytes, on the device where this process has them."""
        with self._lock:
            if self._content is not None:
                return self._content
            found = self._fetch()
            if isinstance(found, np.ndarray):
                found = found.copy() if self._copies else np.asarray(_Writable(found))
            if self._copies or self.is_direct:
                self._content, self.reference = found, None
            return found

    def bring_home(self) -> None:
        """Copy the bytes while they are available; if they are lost, readers get the reason."""
        try:
            self._found()
        except RuntimeError as error:
            with self._lock:
                self._why_lost = str(error.__cause__ or error).partition("\n")[0]
                self.reference = None

    def _fetch(self) -> NDArray[np.uint8] | Tensor:
        if self.reference is None:
            raise RuntimeError(f"an object of the Ray cluster is lost: {self._why_lost}")
        try:
            if not self.is_direct:
                found: object = ray.get(self.reference)
            elif self._copies:  # this process may lack the transport
                found = fetch_home(self.reference, _FETCH_TIMEOUT_S)
            else:
                found = fetch(self.reference)
        except MemoryError:
            raise
        except Exception as error:  # of Ray, or of any transport
            reason = str(error).partition("\n")[0]
            raise RuntimeError(f"an object of the Ray cluster is lost: {reason}") from error
        if (
            not isinstance(found, np.ndarray | Tensor)
            or found.dtype not in (np.uint8, torch.uint8)
            or found.shape != (self.nbytes,)
        ):
            raise RuntimeError(f"an object of {self.nbytes} bytes was announced; it is another")
        return found


class HeldObjects:
    """All objects of a cluster that a process holds, so that it can leave the cluster."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[ObjectBytes] = weakref.WeakSet()
        self._lock = threading.Lock()  # every actor's thread adds members

    def add(self, member: ObjectBytes) -> None:
        """Register an object."""
        with self._lock:
            self._members.add(member)

    def bring_home(self) -> None:
        """Copy all objects that are still referenced."""
        for member in self._present():
            member.bring_home()

    def bring_home_direct(self) -> None:
        """Copy those that are in actors, which are about to end, and may hang."""
        deadline_s = time.monotonic() + _FETCH_TIMEOUT_S
        for member in self._present():
            if member.is_direct and time.monotonic() < deadline_s:
                member.bring_home()

    def _present(self) -> list[ObjectBytes]:
        with self._lock:
            return list(self._members)


class ObjectDecoder:
    """Decodes messages that are accompanied by objects, in one thread at a time."""

    def __init__(self, kinds: Any, held: HeldObjects | None = None) -> None:
        self._held = held
        self._decoder = Decoder(kinds, self._find)
        self._references: Sequence[Any] = ()
        self._found: list[ObjectBytes] = []

    def decode(self, content: bytes, references: Sequence[Any]) -> Any:
        """Decode a message, or raise ``ValueError``; fetch objects in other actors immediately."""
        self._references = references
        try:
            message = self._decoder.decode(content)
            for each in self._found:
                if each.is_direct and self._held is None:
                    each.bring_home()
            return message
        finally:
            self._references, self._found = (), []

    def _find(self, reference: Reference) -> ObjectBytes:
        if not 0 <= reference.number < len(self._references):
            raise ValueError(f"object {reference.number} of {len(self._references)}")
        found = ObjectBytes(self._references[reference.number], reference.nbytes, self._held)
        self._found.append(found)
        return found
