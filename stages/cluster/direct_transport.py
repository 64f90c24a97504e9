"""Ray's Direct Transport: tensors from actor to actor, beside the object store.

An actor keeps what it hands on, and its reader fetches it there. What is in an actor is lost when
that dies, which is why the object store is the rule. ::

    GPU of the source ── transport ──► GPU of the reader
                      └─ its host ── object store ──► host of a reader without one
    host of the source ── transport, or the store if it carries no hosts' tensors ──► host
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.interface.placed_error import described
from stages.remote.codec import INLINE_BYTES, plain_bytes
from stages.remote.shared_memory import RemoteBytes

_FIELD = "runtime.tensor_transport"
_REGISTERED_WITHIN_S = 60.0
_ASKED_EACH_S = 0.01
_HOST, _GPU = "cpu", "cuda"


def check_transport(name: str, *, has_gpus: bool) -> None:
    """Check that Ray has a transport, such as ``nixl``, for what stages put out.

    Raises:
        ValueError: it has not; says why, and what to do.
    """
    from ray.experimental.rdt import util  # only who asks for one waits for its import

    known = _known_name(name)
    if known is None:
        raise ValueError(
            f"{_FIELD}: Ray has no tensor transport {name!r}; give object_store, nixl, or one that "
            "your program has registered by ray.experimental.register_tensor_transport"
        )
    if not util.is_one_sided_transport(known):
        raise ValueError(
            f"{_FIELD}: {name!r} works within a group that is made once, and the worker that "
            "follows one that has died could not join it; give nixl or object_store"
        )
    if not has_gpus and not util.device_match_transport(_HOST, known):
        raise ValueError(
            f"{_FIELD}: {name!r} carries tensors of GPUs alone, and no stage has one (device: "
            "cuda, or num_gpus, of its placement); give nixl or object_store"
        )


def is_direct(reference: Any) -> bool:
    """Whether what a reference stands for is in an actor, and not in the object store."""
    return reference.tensor_transport() is not None


def fetch(reference: Any) -> NDArray[np.uint8] | Tensor:
    """Content that an actor keeps, ``(n,)`` uint8: on its device, or else on the host."""
    if not _is_within_reach(_whereabouts(reference).tensor_transport_meta):
        return fetch_home(reference)
    get: Any = ray.get
    found: Tensor = get(reference)
    return found.numpy() if found.device.type == _HOST else found


def fetch_home(reference: Any, timeout_s: float | None = None) -> NDArray[np.uint8]:
    """The same on the host, by way of the object store, for a reader without a transport."""
    source: Any = _whereabouts(reference).src_actor
    call = source.__ray_call__.options(concurrency_group="_ray_system")
    found: NDArray[np.uint8] = ray.get(call.remote(_on_host, reference.hex()), timeout=timeout_s)
    return found


def _on_host(_: object, reference_id: str) -> NDArray[np.uint8]:
    """Run in the actor that has something."""
    (found,) = _manager().rdt_store.wait_and_get_object(reference_id)
    return plain_bytes(found)


def _is_within_reach(described: Any) -> bool:
    """Whether this process has the kind of device that something is on, by Ray's account of it."""
    if described.tensor_device == _HOST:
        return True
    here, gpus = ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()
    is_on_node = getattr(described, "ray_node_id", None) in (None, here)
    is_on_gpu = getattr(described, "ray_gpu_idx", None) in (None, *gpus)
    return bool(gpus) and is_on_node and is_on_gpu


def _whereabouts(reference: Any) -> Any:
    found = _manager().get_rdt_metadata(reference.hex())
    if found is None:
        raise RuntimeError("it is not known any more where it is")
    return found


def _manager() -> Any:
    return ray._private.worker.global_worker.rdt_manager


def forget_borrowed(reference_id: str) -> None:
    """Have Ray forget the place of an object of another process (its issue 57962)."""
    _manager()._managed_rdt_metadata.pop(reference_id, None)


class Offers:
    """Tensors that an actor has announced, until they are asked for."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._waiting: deque[Tensor] = deque()

    def check(self) -> None:
        """Check that the transport works in this process, or raise ``ValueError``."""
        # Ray tells an actor of a program's own transports by a call that may come later.
        until = time.monotonic() + _REGISTERED_WITHIN_S
        while _known_name(self._transport) is None and time.monotonic() < until:
            time.sleep(_ASKED_EACH_S)
        try:
            has_gpu = bool(ray.get_gpu_ids()) and torch.cuda.is_available()
            for device in filter(self._carries, (_HOST, _GPU) if has_gpu else (_HOST,)):
                probe = torch.zeros(1, dtype=torch.uint8, device=device)
                ray.put(probe, _tensor_transport=self._transport)
        except Exception as error:  # whatever a transport raises that is not installed, or broken
            raise ValueError(
                f"{_FIELD}: {self._transport!r} cannot be used in the actor's process: "
                f"{described(error)}; install it on every node, or give object_store"
            ) from error

    def _carries(self, device: str) -> bool:
        from ray.experimental.rdt import util

        known = util.normalize_and_validate_tensor_transport(self._transport)
        return bool(util.device_match_transport(device, known))

    def made_of(self, content: NDArray[np.uint8] | Tensor | RemoteBytes) -> Tensor | None:
        """A copy to be offered, ``(n,)`` uint8, where the content is, or else on the host.

        Returns:
            None for what the transport does not carry, and what is small and on the host. On a GPU
            it stays however small it is, so that what a stage puts out there is all of one place.

        Raises:
            MemoryError: the GPU has no room for a copy.
        """
        found = content.tensor() if isinstance(content, RemoteBytes) else content
        device = found.device if isinstance(found, Tensor) else torch.device(_HOST)
        if not self._carries(device.type):
            device = torch.device(_HOST)
        least = INLINE_BYTES if device.type == _HOST else 0
        if found.nbytes <= least or not self._carries(device.type):
            return None
        if not isinstance(found, Tensor):
            return torch.from_numpy(found.copy())
        try:
            return found.clone() if device == found.device else found.to(device, copy=True)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"no room on {device} for what is handed on: {error}") from error

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Offer some more, in order."""
        self._waiting.extend(tensors)

    def hand_over(self, count: int) -> list[Any]:
        """References to the next ones. They stay here until no reference is left."""
        return [
            ray.put(self._waiting.popleft(), _tensor_transport=self._transport)
            for _ in range(count)
        ]


def _known_name(name: str) -> str | None:
    """What Ray itself calls a transport; None if it has none of that name."""
    from ray.experimental.rdt import util

    try:
        return str(util.normalize_and_validate_tensor_transport(name))
    except ValueError:
        return None
