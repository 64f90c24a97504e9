"""Ray's Direct Transport: tensors from actor to actor, beside the object store.

An actor keeps what it hands on in its own memory, and whoever reads it fetches it there. What lies
in an actor is lost when that dies, which is why the object store is the rule.
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

from engine.interface.described_error import described
from stages.cluster.parcels import plain_bytes
from stages.remote.remote_bytes import RemoteBytes

__all__ = ["Offers", "check_transport", "forget_borrowed", "is_direct", "offered_bytes"]

_FIELD = "runtime.tensor_transport"
_REGISTERED_WITHIN_S = 60.0
_ASKED_EACH_S = 0.01


def check_transport(name: str) -> None:
    """Check that Ray has a transport by which stages can hand on what they put out.

    Args:
        name: such as ``nixl``.

    Raises:
        ValueError: it has not; says why, and what to do.
    """
    from ray.experimental.rdt import util  # only who asks for one waits for its import

    try:
        known = util.normalize_and_validate_tensor_transport(name)
    except ValueError:
        raise ValueError(
            f"{_FIELD}: Ray has no tensor transport {name!r}; give object_store, nixl, or one that "
            "your program has registered by ray.experimental.register_tensor_transport"
        ) from None
    if not util.is_one_sided_transport(known):
        raise ValueError(
            f"{_FIELD}: {name!r} works within a group that is made once, and the worker that "
            "follows one that has died could not join it; give nixl or object_store"
        )
    if not util.device_match_transport("cpu", known):
        raise ValueError(
            f"{_FIELD}: {name!r} carries tensors of GPUs alone, and what stages hand on lies in "
            "the memory of their hosts; give nixl or object_store"
        )


def is_direct(reference: Any) -> bool:
    """Whether what a reference stands for lies in an actor, and not in the object store."""
    return reference.tensor_transport() is not None


def offered_bytes(content: NDArray[np.uint8] | Tensor | RemoteBytes) -> Tensor:
    """A copy, ``(n,)`` uint8 on the CPU: what is offered must stay as it is until it is fetched."""
    if isinstance(content, Tensor):
        return content.to("cpu", copy=True)
    return torch.from_numpy(plain_bytes(content).copy())


def forget_borrowed(reference_id: str) -> None:
    """Have Ray forget where something lies that another process owns.

    It keeps that for ever otherwise, one to two KiB for each (its issue 57962).
    """
    manager = ray._private.worker.global_worker.rdt_manager
    manager._managed_rdt_metadata.pop(reference_id, None)


class Offers:
    """What an actor has said that it hands on, until it is asked for.

    Args:
        transport: Ray's name of it.
    """

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._waiting: deque[Tensor] = deque()

    def check(self) -> None:
        """Check that the transport works in this process.

        Ray tells an actor of transports that a program has registered by a call of its own, which
        comes after the one that makes it.

        Raises:
            ValueError: it does not.
        """
        until = time.monotonic() + _REGISTERED_WITHIN_S
        while not _is_known(self._transport) and time.monotonic() < until:
            time.sleep(_ASKED_EACH_S)
        try:
            ray.put(torch.zeros(1, dtype=torch.uint8), _tensor_transport=self._transport)
        except Exception as error:  # whatever a transport raises that is not installed, or broken
            raise ValueError(
                f"{_FIELD}: {self._transport!r} cannot be used in the actor's process: "
                f"{described(error)}; install it on every node, or give object_store"
            ) from error

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Offer some more, in order."""
        self._waiting.extend(tensors)

    def hand_over(self, count: int) -> list[Any]:
        """References to the next ones. They stay here until nobody has a reference any more."""
        return [
            ray.put(self._waiting.popleft(), _tensor_transport=self._transport)
            for _ in range(count)
        ]


def _is_known(name: str) -> bool:
    from ray.experimental.rdt import util

    try:
        util.normalize_and_validate_tensor_transport(name)
    except ValueError:
        return False
    return True
