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

from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt
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
) -> None:
    bias = None
    if num_distances is not None:
        generator = torch.Generator().manual_seed(num_distances)
        bias = 2.0 * torch.randn(shape.num_heads, num_distances, generator=generator)
    backend = TritonBackend(CPU, dtype, shape.block_size)
    output, memory = run_steps(backend, shape, bounds, softcap, bias=bias, dtype=dtype)
    expected, written = run_steps(
        ReferenceBackend(), shape, bounds, softcap, bias=bias, dtype=dtype
    )
    assert expected.isfinite().all()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(memory, written)


DECODES, LONG_DECODE = Shape((1, 1), (90, 4), 16), Shape((1,), (300,), 16, 2, 1)
MIXED, PREFIX = Shape((1, 5, 8), (40, 21, 8), 16), Shape((20,), (60,), 16, 7, 1)
CASES: dict[str, tuple[Shape, str, float | None, int | None, torch.dtype]] = {
    "mixed, pages of 24": (MIXED.with_block_size(24), "all", 30.0, None, torch.float32),
    "mixed, biased": (MIXED, "window of 16", None, 33, torch.float32),
    "decodes": (DECODES, "chunks of 7", None, None, torch.float16),
    "segments": (LONG_DECODE, "all", None, 600, torch.float32),
    "padded heads": (Shape((1, 1), (17, 31), 16, 6, 3, 80), "all", None, None, torch.bfloat16),
    "odd groups, a prefix": (PREFIX, "windows in chunks", None, None, torch.float16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_equals_the_reference_and_reads_nothing_hidden(
    case: tuple[Shape, str, float | None, int | None, torch.dtype],
):
    shape, bounds, softcap, num_distances, dtype = case
    assert_equals_the_reference(shape, BOUNDS[bounds], softcap, num_distances, dtype)


@pytest.mark.parametrize("query_lens", [(1, 1, 1), (1, 2, 19)], ids=["decodes", "mixed"])
def test_cross_attention_equals_brute_force(query_lens: tuple[int, ...]):
    shape = CrossShape(query_lens, (40, 0, 33), (True, False, False), 16)
    assert_steps_equal_brute_force(TritonBackend(CPU, torch.float32, 16), shape)


def test_an_engine_gives_the_same_tokens_with_it(seeded):
    prompts = [TokensPrompt(tuple(range(5, 5 + length))) for length in (3, 18)]
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    answers = []
    for backend in ("triton", "torch"):
        config = EngineConfig(
            model=seeded("gemma2"), num_blocks=64, device="cpu", attention_backend=backend
        )
        outputs = LLMEngine(config).generate(prompts, params)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


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
