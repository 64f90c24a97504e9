"""A direct transport for Ray by files: an offered tensor stays in a file until it is freed."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.experimental import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)

FILES = "OMNI_TEST_FILES"
"""Ray's name of the transport."""

_FETCHED = "fetched"


@dataclass
class _File(TensorTransportMetadata):
    path: str = ""


class FileTransport(TensorTransportManager):
    """Only the methods that Ray calls on CPU tensors put by one actor and fetched by another."""

    def tensor_transport_backend(self) -> str:
        return FILES

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> _File:
        path = _folder() / obj_id
        torch.save(rdt_object, path)
        described = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        return _File(described, "cpu", str(path))

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        found: list[Any] = torch.load(tensor_transport_metadata.path, weights_only=True)
        with (_folder() / _FETCHED).open("a") as log:
            log.write(f"{obj_id}\n")
        return found

    def send_multiple_tensors(self, *_: Any) -> None:
        raise NotImplementedError("nothing is sent: it is fetched")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        Path(tensor_transport_meta.path).unlink(missing_ok=True)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        pass


def register_files() -> None:
    """Register it with Ray, in this process and in actors started from now on."""
    try:
        register_tensor_transport(FILES, ["cpu"], FileTransport, torch.Tensor)
    except ValueError as error:
        if "already registered" not in str(error):
            raise


def _folder() -> Path:
    """Return the folder for the files of this process's cluster and job."""
    context = ray.get_runtime_context()
    name = f"omni-files-{context.gcs_address.replace(':', '-')}-{context.get_job_id()}"
    folder = Path(tempfile.gettempdir(), name)
    folder.mkdir(exist_ok=True)
    return folder


def num_fetched() -> int:
    """Return how often a tensor was fetched."""
    log = _folder() / _FETCHED
    return len(log.read_text().splitlines()) if log.exists() else 0


def num_offered() -> int:
    """Return the number of tensors on offer."""
    return sum(path.name != _FETCHED for path in _folder().iterdir())


def remove_files() -> None:
    """Remove all files."""
    shutil.rmtree(_folder())
