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

_FETCHED_WITHIN_S = 10.0
"""From an actor that may hang, by the process that would end it."""


class _Writable:
    """Over an array that may only be read. Torch wants another one, and it is never written to."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self._content = content
        self.__array_interface__ = {
            "data": (content.ctypes.data, False),
            "shape": content.shape,
            "typestr": "|u1",
            "version": 3,
        }


class ObjectBytes(RemoteBytes):
    """A reference to an object, which stays in the store, or in its actor, while anybody has one.

    Args:
        reference: Ray's, to an array or a tensor, ``(nbytes,)`` of uint8.
        held: of a process that may leave the cluster while its users keep what they got: it
            copies what it reads, out of a store that must not fill up. A worker, which has none,
            reads in the store itself.
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
        """The bytes, wherever they are here."""
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
        """Copy the bytes, while they can be had; if they cannot, a reader gets the reason."""
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
            elif self._copies:  # it need not have the transport
                found = fetch_home(self.reference, _FETCHED_WITHIN_S)
            else:
                found = fetch(self.reference)
        except MemoryError:
            raise
        except Exception as error:  # Ray's, or whatever a transport raises
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
    """All that a process has of a cluster's objects, so that it can leave the cluster."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[ObjectBytes] = weakref.WeakSet()
        self._lock = threading.Lock()  # every actor's thread adds some

    def add(self, member: ObjectBytes) -> None:
        """Know of one."""
        with self._lock:
            self._members.add(member)

    def bring_home(self) -> None:
        """Make copies of all that somebody still has."""
        for member in self._present():
            member.bring_home()

    def bring_home_direct(self) -> None:
        """The same of what is in actors, which are about to end, and may hang."""
        until = time.monotonic() + _FETCHED_WITHIN_S
        for member in self._present():
            if member.is_direct and time.monotonic() < until:
                member.bring_home()

    def _present(self) -> list[ObjectBytes]:
        with self._lock:
            return list(self._members)


class ObjectDecoder:
    """Decodes messages with objects beside them, in one thread at a time."""

    def __init__(self, kinds: Any, held: HeldObjects | None = None) -> None:
        self._held = held
        self._decoder = Decoder(kinds, self._find)
        self._references: Sequence[Any] = ()
        self._found: list[ObjectBytes] = []

    def decode(self, content: bytes, references: Sequence[Any]) -> Any:
        """Decode a message, or raise ``ValueError``; fetch at once what is in other actors."""
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
