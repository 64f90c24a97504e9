"""A fake GPU: tensors that claim to lie on one, and a transport between its users.

Torch operations on such a tensor run on the host, with results on the GPU again. The transport
carries nothing else and stays within the GPU, like Ray's for CUDA's shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.experimental import CommunicatorMetadata, register_tensor_transport
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.support.file_transport import FileTransport

WITHIN_GPU = "OMNI_TEST_GPU"
"""Ray's name of the transport."""


class GpuTensor(Tensor):
    """A tensor that claims to lie on ``cuda``."""

    _content: Tensor

    @staticmethod
    def __new__(cls, content: Tensor) -> GpuTensor:
        make: Any = Tensor._make_wrapper_subclass
        made: GpuTensor = make(
            cls, content.size(), strides=content.stride(), dtype=content.dtype, device="cuda"
        )
        made._content = content
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks what it passes
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        device = given.pop("device", None)
        done = func(*tree_map(_content_of, args), **tree_map(_content_of, given))
        if device is not None and torch.device(device).type == "cpu":
            return done
        return tree_map(lambda each: cls(each) if isinstance(each, Tensor) else each, done)


def _content_of(value: Any) -> Any:
    return value._content if isinstance(value, GpuTensor) else value


@dataclass
class _OnGpu:
    """Metadata by which Ray's own transport within a GPU describes an offer and its location."""

    tensor_meta: list[Any]
    tensor_device: str
    path: str
    ray_node_id: str
    ray_gpu_idx: Any


class WithinGpu(FileTransport):
    """A transport within the GPU, also by files."""

    def tensor_transport_backend(self) -> str:
        return WITHIN_GPU

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> Any:
        assert all(type(tensor) is GpuTensor for tensor in rdt_object)
        found = super().extract_tensor_transport_metadata(
            obj_id, [tensor._content for tensor in rdt_object]
        )
        node, gpus = ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()
        return _OnGpu(found.tensor_meta, "cuda", found.path, node, gpus[0])

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        assert tensor_transport_metadata.ray_gpu_idx in ray.get_gpu_ids()
        found = super().recv_multiple_tensors(
            obj_id, tensor_transport_metadata, communicator_metadata, target_buffers
        )
        return [GpuTensor(tensor) for tensor in found]


def register_within_gpu() -> None:
    """Register it with Ray, in this process and in actors started from now on."""
    try:
        register_tensor_transport(WITHIN_GPU, ["cuda"], WithinGpu, GpuTensor)
    except ValueError as error:
        if "already registered" not in str(error):
            raise
