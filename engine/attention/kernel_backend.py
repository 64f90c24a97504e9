"""Base class of backends whose kernels are compiled for a device and probed by a trial run."""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import ClassVar

import torch

from engine.attention.metadata import AttentionBackend, AttentionMetadata, LayerCall, Scoring
from engine.interface.placed_error import described
from engine.resources.device import on_device, require_finite
from prefix_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, PagedMemory

_MIN_CAPABILITY = (8, 0)


class KernelBackend(AttentionBackend):
    """A backend whose support is only known by running its kernels; see :meth:`probe`."""

    dtypes: ClassVar[tuple[torch.dtype, ...]]

    @abstractmethod
    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int) -> None: ...

    @classmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """Require CUDA and a dtype that the kernels support; see also :meth:`probe`."""
        if device.type != "cuda":
            raise ValueError(f"the {cls.name} backend runs on CUDA devices only, not on {device}")
        if dtype not in cls.dtypes:
            *others, last = (str(each).removeprefix("torch.") for each in cls.dtypes)
            known = f"{', '.join(others)} or {last}"
            raise ValueError(f"the {cls.name} backend needs {known}, got {dtype}")
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            raise ValueError(
                f"the {cls.name} backend needs compute capability 8.0 or later, "
                f"{device} has {capability[0]}.{capability[1]}"
            )

    @classmethod
    @cache
    def probe(
        cls, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
    ) -> None:
        """Run a decode and a prefill on zeros; failures raise ``ValueError`` with the reason."""
        try:
            with on_device(device), torch.inference_mode():
                cls._attend_to_zeros(device, dtype, block_size, head_dim)
        except Exception as error:  # a missing package, library or compiler, or a refused input
            reason = " ".join(described(error).split())
            raise ValueError(
                f"the {cls.name} backend cannot run with {dtype}, block_size {block_size} and "
                f"heads of {head_dim} on {device}: {reason}"
            ) from error

    @classmethod
    def _attend_to_zeros(
        cls, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
    ) -> None:
        group = KVCacheGroup(("probe",), FullAttentionSpec(block_size, 1, head_dim, dtype))
        memory = PagedMemory(KVCacheConfig(3, (group,)), device)
        slots = torch.tensor((block_size + 1, 2 * block_size + 1, 2 * block_size + 2))
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor((0, 1, 3), dtype=torch.int32),
            seq_lens=torch.tensor((2, 3), dtype=torch.int32),
            block_table=torch.tensor(((1,), (2,)), dtype=torch.int32, device=device),
            row_mapping=memory.row_mapping(0, slots).to(device),
            num_decodes=1,
            block_size=block_size,
        )
        query = torch.zeros(3, 2, head_dim, dtype=dtype, device=device)
        key = query[:, :1]
        backend = cls(device, dtype, block_size)
        backend.begin_step(metadata)
        call = LayerCall(query, key, key, memory.layer(0, 0), metadata, Scoring(1.0))
        require_finite({"outputs": backend.forward(call)})
