"""Ray's Direct Transport: sends tensors from actor to actor, bypassing the object store.

An actor keeps the tensors that it sends, and the reader fetches them there. They are lost when the
actor dies, which is why the object store is the default. ::

    GPU of the source ── transport ──► GPU of the reader
                      └─ its host ── object store ──► host of a reader without a GPU
    host of the source ── transport, or the store if it does not support host tensors ──► host
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
_REGISTRATION_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.01
_HOST, _GPU = "cpu", "cuda"


def check_transport(name: str, *, has_gpus: bool) -> None:
    """Check that Ray has a transport, such as ``nixl``, that works for the stages' outputs.

    Raises:
        ValueError: it has not; the message has the reason and a remedy.
    """
    from ray.experimental.rdt import util  # slow import, only needed for a transport

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
    """Return True if the object of a reference is in an actor, not in the object store."""
    return reference.tensor_transport() is not None


def fetch(reference: Any) -> NDArray[np.uint8] | Tensor:
    """Fetch content that an actor keeps, ``(n,)`` uint8: on its device, or else on the host."""
    if not _is_reachable(_metadata(reference).tensor_transport_meta):
        return fetch_home(reference)
    get: Any = ray.get
    found: Tensor = get(reference)
    return found.numpy() if found.device.type == _HOST else found


def fetch_home(reference: Any, timeout_s: float | None = None) -> NDArray[np.uint8]:
    """Fetch it to the host, through the object store, for a reader without a transport."""
    source: Any = _metadata(reference).src_actor
    call = source.__ray_call__.options(concurrency_group="_ray_system")
    found: NDArray[np.uint8] = ray.get(call.remote(_on_host, reference.hex()), timeout=timeout_s)
    return found


def _on_host(_: object, reference_id: str) -> NDArray[np.uint8]:
    """Return the content on the host; runs in the actor that keeps it."""
    (found,) = _manager().rdt_store.wait_and_get_object(reference_id)
    return plain_bytes(found)


def _is_reachable(described: Any) -> bool:
    """Return True if this process can use the device of an object, according to Ray's metadata."""
    if described.tensor_device == _HOST:
        return True
    here, gpus = ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()
    is_on_node = getattr(described, "ray_node_id", None) in (None, here)
    is_on_gpu = getattr(described, "ray_gpu_idx", None) in (None, *gpus)
    return bool(gpus) and is_on_node and is_on_gpu


def _metadata(reference: Any) -> Any:
    found = _manager().get_rdt_metadata(reference.hex())
    if found is None:
        raise RuntimeError("it is not known any more where it is")
    return found


def _manager() -> Any:
    return ray._private.worker.global_worker.rdt_manager


def forget_borrowed(reference_id: str) -> None:
    """Delete Ray's metadata of an object of another process (Ray issue 57962)."""
    _manager()._managed_rdt_metadata.pop(reference_id, None)


class Offers:
    """Tensors that an actor has announced, until they are requested."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._waiting: deque[Tensor] = deque()

    def check(self) -> None:
        """Check that the transport works in this process, or raise ``ValueError``."""
        # Ray registers a program's own transports in an actor by a call that may come later.
        deadline_s = time.monotonic() + _REGISTRATION_TIMEOUT_S
        while _known_name(self._transport) is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_INTERVAL_S)
        try:
            has_gpu = bool(ray.get_gpu_ids()) and torch.cuda.is_available()
            for device in filter(self._carries, (_HOST, _GPU) if has_gpu else (_HOST,)):
                probe = torch.zeros(1, dtype=torch.uint8, device=device)
                ray.put(probe, _tensor_transport=self._transport)
        except Exception as error:  # a transport that is not installed, or broken, raises anything
            raise ValueError(
                f"{_FIELD}: {self._transport!r} cannot be used in the actor's process: "
                f"{described(error)}; install it on every node, or give object_store"
            ) from error

    def _carries(self, device: str) -> bool:
        from ray.experimental.rdt import util

        known = util.normalize_and_validate_tensor_transport(self._transport)
        return bool(util.device_match_transport(device, known))

    def made_of(self, content: NDArray[np.uint8] | Tensor | RemoteBytes) -> Tensor | None:
        """Copy content to be offered, ``(n,)`` uint8, on its own device or else on the host.

        Returns:
            The copy; None for what the transport does not support, and for small content on the
            host. Small content on a GPU stays there, so that a stage's outputs are on one device.

        Raises:
            MemoryError: the GPU has no memory for a copy.
        """
        found = content.tensor() if isinstance(content, RemoteBytes) else content
        device = found.device if isinstance(found, Tensor) else torch.device(_HOST)
        if not self._carries(device.type):
            device = torch.device(_HOST)
        min_bytes = INLINE_BYTES if device.type == _HOST else 0
        if found.nbytes <= min_bytes or not self._carries(device.type):
            return None
        if not isinstance(found, Tensor):
            return torch.from_numpy(found.copy())
        try:
            return found.clone() if device == found.device else found.to(device, copy=True)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"no room on {device} for what is handed on: {error}") from error

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Offer more tensors, in order."""
        self._waiting.extend(tensors)

    def hand_over(self, count: int) -> list[Any]:
        """Return references to the next tensors, which stay here until no reference is left."""
        return [
            ray.put(self._waiting.popleft(), _tensor_transport=self._transport)
            for _ in range(count)
        ]


def _known_name(name: str) -> str | None:
    """Return Ray's own name of a transport; None if it has none of that name."""
    from ray.experimental.rdt import util

    try:
        return str(util.normalize_and_validate_tensor_transport(name))
    except ValueError:
        return None
