"""Offload tiers below an engine's pool, keyed by everything that its blocks' bytes depend on."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from engine.checkpoints.checkpoint import Checkpoint
from engine.files.disk_cache import file_digest
from engine.interface.config import EngineConfig
from prefix_cache import DiskTier, HostTier, KVCacheManager, OffloadedBlocks, PagedMemory

_PACKAGES = Path(__file__).parents[2]
_LIBRARIES = ("torch", "transformers", "numpy", "gguf")
_WEIGHTS_AND_CODE = frozenset({".safetensors", ".json", ".py"})


def build_offloaded_blocks(
    config: EngineConfig,
    checkpoint: Checkpoint,
    manager: KVCacheManager,
    memory: PagedMemory,
    attention: str,
) -> OffloadedBlocks | None:
    """Build the tiers that a config requests, or return None.

    Raises:
        ValueError: a host tier for a pool that is in host memory, or an unusable folder.
    """
    offload = config.offload
    if offload is None:
        return None
    device = memory.buffer.device
    if offload.host_bytes is not None and device.type == "cpu":
        raise ValueError(
            "offload.host_bytes is for a pool on a GPU; on a CPU the pool is in host memory "
            "itself: raise num_blocks instead, and leave host_bytes out"
        )
    host = None if offload.host_bytes is None else HostTier(offload.host_bytes)
    disk = None
    if offload.disk is not None:
        fingerprint = _fingerprint(config, checkpoint, memory, attention)
        disk = DiskTier(offload.disk.path, offload.disk.bytes, fingerprint)
    return OffloadedBlocks(manager, memory, host, disk)


def _fingerprint(
    config: EngineConfig, checkpoint: Checkpoint, memory: PagedMemory, attention: str
) -> bytes:
    """Compute a SHA-256 over weights, element types, layout, machine and code.

    The machine is included because kernels for other processors round differently.
    """
    device = memory.buffer.device
    facts = [
        *sorted(_file_digests(checkpoint.path)),
        repr(None if checkpoint.part is None else checkpoint.part.name),
        repr(memory.config.groups),
        repr((config.max_model_len, config.quantization, config.encoder_quantization)),
        repr((attention, device.type)),
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        *(f"{name} {version(name)}" for name in _LIBRARIES),
        _code_digest(),
    ]
    return hashlib.sha256("\0".join(facts).encode()).digest()


def _file_digests(folder: Path) -> Iterator[str]:
    """Yield name and digest of every file of weights, settings and code; read in threads."""
    files = [file for file in folder.rglob("*") if file.suffix in _WEIGHTS_AND_CODE] or [folder]
    with ThreadPoolExecutor() as threads:
        for file, digest in zip(files, threads.map(file_digest, files), strict=True):
            yield f"{file.relative_to(folder).as_posix()} {digest}"


@cache
def _code_digest() -> str:
    """Hash the code that computes rows: the version does not change with every code change."""
    digest = hashlib.sha256()
    for package in ("engine", "prefix_cache"):
        for file in sorted((_PACKAGES / package).rglob("*")):
            if file.suffix in (".py", ".c", ".h", ".cpp"):
                digest.update(file.relative_to(_PACKAGES).as_posix().encode())
                digest.update(file_digest(file).encode())
    return digest.hexdigest()
