"""GPU kernels: probing whether they run; interpreted Triton kernels against the reference.

Everything that no query may see holds NaN. ``make interpret`` runs many more cases:
``tests/engine/attention/every_triton_case.py``.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.attention import triton_backend
from engine.attention.kernel_backend import KernelBackend
from engine.attention.registry import get_backend, resolve_backend_name
from engine.attention.triton_backend import TritonBackend
from engine.attention.xformers_backend import XformersBackend
from engine.llm import llm_engine
from tests.engine.attention.test_attention_cross import CrossShape, assert_steps_equal_brute_force
from tests.support.attention_steps import BOUNDS, IMAGES, Bounds, Shape, run_steps
from tests.support.import_graph import ROOT
from tests.support.interpreted_triton import need_interpreter
from tests.support.materialised_xformers import MaterialisedXformers
from tests.support.reference_attention import ReferenceBackend

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


@pytest.fixture
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
    "odd groups": (Shape((9,), (49,), 16, 7, 1), "window of 16", None, None, torch.float16),
    "image": (Shape((1, 9), (3, 49), 16), "images of 7 in a window", None, None, torch.float16),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_equals_the_reference_and_reads_nothing_hidden(
    case: tuple[Shape, str, float | None, int | None, torch.dtype],
):
    shape, bounds, softcap, num_distances, dtype = case
    bound = (BOUNDS | IMAGES)[bounds]
    assert_equals_the_reference(shape, bound, softcap, num_distances, dtype)


@pytest.mark.usefixtures("interpreted")
def test_cross_attention_equals_brute_force():
    shape = CrossShape((1, 1, 9), (20, 0, 33), (True, False, False), 16)
    assert_steps_equal_brute_force(TritonBackend(CPU, torch.float32, 16), shape)


@pytest.mark.usefixtures("interpreted")
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


CUDA = torch.device("cuda")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> str:
    """Simulate a GPU with packages installed whose kernels fail, as if a library did not load."""
    reason = "xFormers wasn't build with CUDA support"

    def refuse(*_: object) -> None:
        raise NotImplementedError(reason)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda _: 0)
    monkeypatch.setattr(triton_backend, "find_spec", lambda _: object())
    monkeypatch.setattr(KernelBackend, "_attend_to_zeros", refuse)
    KernelBackend.probe.cache_clear()
    return reason


def test_the_probe_reports_the_reasons_of_xformers():
    pytest.importorskip("xformers", exc_type=ImportError)
    with pytest.raises(ValueError, match=r"heads of 64 on cpu: ValueError: .*device=cpu \(supp"):
        XformersBackend.probe(CPU, torch.float16, 16, 64)


def test_the_probe_accepts_kernels_that_run():
    pytest.importorskip("xformers", exc_type=ImportError)
    for block_size, head_dim in ((16, 64), (48, 20)):
        MaterialisedXformers.probe(CPU, torch.float32, block_size, head_dim)


def test_auto_falls_back_to_torch_with_one_warning(refused: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "omni"):
        assert resolve_backend_name("auto", CUDA, torch.float16, 16) == "torch"
    assert len(caplog.records) == 1
    assert refused in caplog.text


@pytest.mark.parametrize("name", ["triton", "xformers"])
def test_a_backend_requested_by_name_is_refused_with_the_reason(refused: str, name: str):
    with pytest.raises(ValueError, match=rf"block_size 32 and heads of 64 on cuda: .*{refused}"):
        get_backend(name, CUDA, torch.float16, 32)


@pytest.mark.parametrize(
    ("dtype", "block_size", "head_dims", "reason"),
    [
        (torch.float64, 16, (64,), "needs float16, bfloat16 or float32, got torch.float64"),
        (torch.float16, 8, (64,), "needs a block_size of at least 16, got 8"),
        (torch.float16, 16, (64, 320), "heads have at most 256 numbers, got 320"),
    ],
)
def test_triton_names_its_requirements(
    refused: str,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    block_size: int,
    head_dims: tuple[int, ...],
    reason: str,
):
    monkeypatch.setattr(KernelBackend, "_attend_to_zeros", lambda *_: None)
    with pytest.raises(ValueError, match=reason):
        resolve_backend_name("triton", CUDA, dtype, block_size, head_dims)


def test_a_missing_triton_package_is_reported(refused: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_backend, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="needs the package triton, which is not installed"):
        get_backend("triton", CUDA, torch.float16, 16)


def test_triton_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="the triton backend runs on CUDA devices only, not on cp"):
        get_backend("triton", CPU, torch.float32, 16)


def test_all_head_sizes_are_probed(refused: str, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    monkeypatch.setattr(TritonBackend, "probe", lambda *needs: asked.append(needs[-1]))
    name = resolve_backend_name("auto", CUDA, torch.bfloat16, 16, head_dims=(80, 128))
    assert (name, asked) == ("triton", [80, 128])


def test_an_engine_probes_the_head_sizes_of_its_model(
    seeded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[Collection[int]] = []

    def resolve(*needs: object) -> str:
        asked.append(needs[4] if len(needs) > 4 else ())  # type: ignore[arg-type]
        return "torch" if len(needs) > 4 else "triton"

    monkeypatch.setattr(llm_engine, "resolve_backend_name", resolve)
    engine = LLMEngine(EngineConfig(model=seeded("qwen2"), num_blocks=16, device="cpu"))
    head_dims = {layer.spec.head_dim for layer in engine._runner._model.attention_layers}
    assert asked == [(), head_dims]
    assert engine.generate("a b", SamplingParams(max_tokens=2))[0].error is None


RUN = """
import sys
sys.modules["xformers"] = None  # whoever imports it from now on gets an ImportError
from engine import EngineConfig, LLMEngine, SamplingParams
config = EngineConfig(model={model!r}, num_blocks=16, device="cpu")
LLMEngine(config).generate("a b c", SamplingParams(max_tokens=2))
try:
    LLMEngine(config.model_copy(update=dict(attention_backend="xformers")))
except ValueError as error:
    assert "the xformers backend runs on CUDA devices only" in str(error), error
else:
    raise AssertionError("it was taken")
"""


def test_a_cpu_needs_no_xformers_and_requesting_it_names_its_requirements(
    seeded: Callable[[str], str],
) -> None:
    code = RUN.format(model=seeded("qwen2"))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_warning_of_triton_at_the_import_of_xformers_fails_no_test() -> None:
    message = (
        "warmup, rep, and use_cuda_graph parameters are deprecated. "
        "See https://github.com/triton-lang/triton/pull/4496 for details."
    )
    warnings.warn(message, DeprecationWarning, stacklevel=1)
