"""Triton's kernels, compiled for an absent GPU and never launched. A separate program.

    python -m tests.support.compiled_kernels [90 | 80]

Runs steps of engines' shapes through the triton backend on CPU tensors. Prints a line of JSON per
kernel: its name, the model, and its registers, shared memory and spills.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.attention import triton_backend, triton_kernels
from engine.attention.metadata import LayerCall, Scoring
from tests.support.paged_batch import (
    cross_metadata_for,
    layer_of,
    metadata_for,
    paged_memory,
    random_block_table,
)


class GpuTarget:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        """An NVIDIA GPU."""
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Return a stream; none runs."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the tensors."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return CUDA's interface."""
        return torch.cuda

    @staticmethod
    def is_active() -> bool:
        """Return True: it replaces the missing driver."""
        return True


class _Compiled:
    """``kernel[grid](...)`` compiles without launching."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.kernel.warmup(*args, grid=grid, **options)

    def take_all(self) -> list[Any]:
        """Return and forget what was compiled."""
        compiled, *_ = self.kernel.device_caches[0]
        taken = list(compiled.values())
        self.kernel.device_caches.clear()
        return taken


KERNELS = ("paged_attention", "merge_segments")
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {"heads": (14, 2, 64)},
    "Qwen2.5-7B": {"heads": (28, 4, 128)},
    "Gemma-2, capped and with windows": {
        "heads": (16, 8, 256),
        "softcap": 50.0,
        "windows": (None, 4096),
    },
    "Phi, heads of 80": {"heads": (32, 32, 80)},
    "tiny T5": {"heads": (4, 4, 16), "num_distances": 9, "crosses": True},
    "T5, biased and cross": {"heads": (8, 8, 64), "num_distances": 129, "crosses": True},
    "float32": {"heads": (8, 2, 128), "dtype": torch.float32},
    "float32, the widest heads": {"heads": (4, 2, 256), "dtype": torch.float32},
}
# Batches of growing sequences, decodes first.
STEPS = [
    *(((1,), (length,)) for length in (1, 100, 116, 260, 2000)),
    *(((1,) * count, (200 + count,) * count) for count in (1, 2, 3, 8, 16, 24)),
    ((16,), (16,)),
    ((300,), (340,)),
    ((1, 1, 17, 80), (30, 400, 17, 500)),
]


def compile_for(capability: int) -> None:
    """Make Triton compile for a GPU of that capability, such as 90."""
    driver.set_active(GpuTarget(capability))
    for name in KERNELS:
        setattr(triton_kernels, name, _Compiled(getattr(triton_kernels, name)))


def run_model(
    heads: tuple[int, int, int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    softcap: float | None = None,
    windows: tuple[int | None, ...] = (None,),
    num_distances: int | None = None,
    crosses: bool = False,
) -> None:
    """Run all steps for a model's heads; queries come from a fused projection."""
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(0)
    backend = triton_backend.TritonBackend(torch.device("cpu"), dtype, block_size)
    bias = None if num_distances is None else torch.zeros(num_heads, num_distances)
    memory = paged_memory(
        num_blocks=512,
        block_size=block_size,
        num_layers=3,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    for query_lens, seq_lens in STEPS:
        table = random_block_table(seq_lens, block_size, 512, generator)
        steps = [
            (metadata_for(memory, query_lens, seq_lens, table, window=window), bias)
            for window in windows
        ]
        if crosses:
            nothing = (False,) * len(seq_lens)
            steps.append((cross_metadata_for(memory, query_lens, seq_lens, nothing, table), None))
        for metadata, of_layer in steps:
            width = num_heads + 2 * num_kv_heads
            qkv = torch.zeros(metadata.num_tokens, width, head_dim, dtype=dtype)
            query, key, value = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
            written = metadata.row_mapping.shape[0]
            for layer in range(3):
                backend.begin_step(metadata)
                scoring = Scoring(0.1, softcap, of_layer)
                call = LayerCall(
                    query,
                    key[:written],
                    value[:written],
                    layer_of(memory, layer),
                    metadata,
                    scoring,
                )
                backend.forward(call)


def compile_models(names: list[str]) -> list[dict[str, Any]]:
    """Return what was compiled for each model, and the resources it needs."""
    compiled = []
    for name in names:
        run_model(**MODELS[name])
        for kernel in KERNELS:
            for each in getattr(triton_kernels, kernel).take_all():
                compiled.append(
                    {
                        "model": name,
                        "kernel": kernel,
                        "shared_bytes": each.metadata.shared,
                        "warps": each.metadata.num_warps,
                        **resources(each),
                    }
                )
    return compiled


def resources(compiled: Any) -> dict[str, int]:
    """Return registers per thread and bytes spilled to the stack, as ``cuobjdump`` reports them."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        reported = subprocess.run(
            [program, "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", reported))
    return {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"])}


if __name__ == "__main__":
    compile_for(int(sys.argv[1]) if len(sys.argv) > 1 else 90)
    for line in compile_models(sys.argv[2:] or list(MODELS)):
        print(json.dumps(line), flush=True)
