"""The kernels of the triton backend, interpreted on a CPU, against the reference.

All that no query may see holds NaN. ``make interpret`` runs many more cases:
``tests/engine/attention/every_triton_case.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.attention.reference import ReferenceBackend
from engine.attention.triton_backend import TritonBackend
from tests.engine.attention.test_attention_cross import CrossShape, assert_steps_equal_brute_force
from tests.support.attention_steps import BOUNDS, Bounds, Shape, run_steps
from tests.support.import_graph import ROOT
from tests.support.interpreted_triton import need_interpreter

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


@pytest.fixture(autouse=True)
def interpreted() -> None:
    need_interpreter()


def assert_equals_the_reference(
    shape: Shape,
    bounds: Bounds = BOUNDS["all"],
    softcap: float | None = None,
    num_distances: int | None = None,
    dtype: torch.dtype = torch.float32,
    num_layers: int = 2,
) -> None:
    bias = None
    if num_distances is not None:
        generator = torch.Generator().manual_seed(num_distances)
        bias = 2.0 * torch.randn(shape.num_heads, num_distances, generator=generator)
    backend = TritonBackend(CPU, dtype, shape.block_size)
    (output, memory), (expected, written) = (
        run_steps(each, shape, bounds, softcap, bias=bias, dtype=dtype, num_layers=num_layers)
        for each in (backend, ReferenceBackend())
    )
    assert expected.isfinite().all()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(memory, written)


CASES: dict[str, tuple[Shape, str, float | None, int | None, torch.dtype]] = {
    "mixed": (Shape((1, 4, 7), (40, 21, 7), 24), "window of 16", 30.0, None, torch.float32),
    "segments": (Shape((1,), (300,), 16, 2, 1), "all", None, 290, torch.float32),
    "padded heads": (Shape((1, 1), (17, 31), 16, 6, 3, 80), "all", None, None, torch.bfloat16),
    "odd groups": (Shape((9,), (49,), 16, 7, 1), "windows in chunks", None, None, torch.float16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_equals_the_reference_and_reads_nothing_hidden(
    case: tuple[Shape, str, float | None, int | None, torch.dtype],
):
    shape, bounds, softcap, num_distances, dtype = case
    assert_equals_the_reference(shape, BOUNDS[bounds], softcap, num_distances, dtype)


def test_cross_attention_equals_brute_force():
    shape = CrossShape((1, 1, 9), (20, 0, 33), (True, False, False), 16)
    assert_steps_equal_brute_force(TritonBackend(CPU, torch.float32, 16), shape)


def test_at_most_three_kernels_are_compiled_for_a_model_whose_sequences_grow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-m", "tests.support.compiled_kernels", "90", "tiny T5"]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = sorted(each["kernel"] for each in compiled)
    assert kernels == ["merge_segments", "paged_attention", "paged_attention"]
    assert all(each["shared_bytes"] < 2**17 and not each["stack_bytes"] for each in compiled)
