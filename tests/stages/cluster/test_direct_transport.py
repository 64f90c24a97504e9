"""Direct transports: offered contents and devices; see also tests/omni/runtime/test_ray_gpus.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stages.cluster.direct_transport import Offers
from stages.remote.codec import INLINE_BYTES
from tests.support.made_up_gpu import GpuTensor

_LARGE = torch.zeros(INLINE_BYTES + 1, dtype=torch.uint8)
_LITTLE = torch.zeros(8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("transport", "content", "device"),
    [
        ("nixl", _LARGE, "cpu"),
        ("nixl", _LARGE.numpy(), "cpu"),
        ("nixl", _LITTLE, None),
        ("nixl", GpuTensor(_LARGE), "cuda"),
        ("nixl", GpuTensor(_LITTLE), "cuda"),
        ("nixl", GpuTensor(_LITTLE[:0]), None),
        ("cuda_ipc", _LARGE, None),
        ("cuda_ipc", GpuTensor(_LITTLE), "cuda"),
        ("gloo", GpuTensor(_LARGE), "cpu"),
        ("gloo", GpuTensor(_LITTLE), None),
    ],
)
def test_content_is_offered_on_the_device_that_the_transport_supports(
    transport: str, content: Any, device: str | None
) -> None:
    """As Ray documents its transports; the offer is a copy, since the content may change."""
    made = Offers(transport).made_of(content)
    assert (None if made is None else made.device.type) == device
    if isinstance(made, torch.Tensor):
        made.fill_(7)
        left = content.cpu().numpy() if isinstance(content, torch.Tensor) else content
        assert not np.any(left)


def test_a_full_gpu_is_a_memory_error_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> GpuTensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GpuTensor, "clone", refuse)
    with pytest.raises(MemoryError, match="^no room on cuda for what is handed on: CUDA out of"):
        Offers("nixl").made_of(GpuTensor(_LITTLE))
