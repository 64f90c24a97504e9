"""The C kernels against torch, their build, the fallback without them, and their thread team."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engine.native as native
from engine import EngineConfig, LLMEngine
from engine.layers import LayerOps, NativeLayerOps
from engine.native import NativeBuildError, NativeKernels, PagedSpans, load_kernels
from engine.native.kernels import compile_kernels, find_compiler
from tests.support.import_graph import ROOT
from tests.support.native_kernels import needs_compiler, needs_kernels, run_pieces
from tests.support.patience import PATIENCE_S

X86_LEVELS = {"x86-64", "x86-64-v3"} if torch.backends.cpu.get_cpu_capability() != "DEFAULT" else {}
WIDTHS = [1, 7, 16, 33, 768]
ROWS = [0, 1, 5]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=2e-6)


@pytest.fixture
def ops() -> LayerOps:
    return NativeLayerOps(load_kernels())


@pytest.fixture
def native_products() -> None:
    if not load_kernels().has_linear:
        pytest.skip("linear.c needs AVX-512, AVX2 or NEON")


@needs_kernels
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_norms_equal_torch(ops: LayerOps, rows: int, width: int):
    x, residual, weight = normal(rows, width), normal(rows, width, seed=1), normal(width, seed=2)
    assert_near(ops.rms_norm(x, weight, 1e-6), LayerOps().rms_norm(x, weight, 1e-6))
    total = x + residual
    normed = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert_near(normed, nn.functional.rms_norm(total, (width,), weight, 1e-6))


@needs_kernels
def test_strided_rows_equal_torch(ops: LayerOps):
    wide, weight = normal(5, 3 * 8), normal(8, seed=2)
    x, gate_up = wide[:, 8:16], wide[:, 4:20]
    assert_near(ops.rms_norm(x, weight, 1e-6), LayerOps().rms_norm(x, weight, 1e-6))
    residual = normal(5, 8, seed=1)
    expected = LayerOps().add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert_near(ops.add_rms_norm(x, residual, weight, 1e-6), expected)
    silu = nn.SiLU()
    assert_near(ops.gate(gate_up, silu), LayerOps().gate(gate_up, silu))


@needs_kernels
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_gate_equals_torch(ops: LayerOps, rows: int, width: int):
    gate_up = 20 * normal(rows, 2 * width)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_near(ops.gate(gate_up, nn.SiLU()), nn.functional.silu(gate) * up)
    assert torch.equal(ops.gate(gate_up, nn.ReLU()), gate.relu() * up)


@needs_kernels
def test_gate_keeps_extremes_finite_and_nan_visible(ops: LayerOps):
    gates = torch.tensor([[-1e4, -100.0, -88.5, 0.0, 88.5, 1e4, float("nan")]])
    gated = ops.gate(torch.cat([gates, torch.ones_like(gates)], dim=1), nn.SiLU())
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 88.5, 1e4, float("nan")]])
    torch.testing.assert_close(gated, expected, atol=1e-30, rtol=1e-6, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("vocab", [1, 63, 64, 130, 1000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_masked_logits_equal_torch(vocab: int, share: float):
    logits = normal(5, vocab)
    logits[0, :] = float("nan")
    # As with llguidance, whole words of 32 bits, of which the last ones stand for no token.
    allowed = np.random.default_rng(0).random((5, -(-vocab // 32) * 32)) < share
    expected = logits.masked_fill(torch.from_numpy(~allowed[:, :vocab]), -torch.inf)
    load_kernels().mask_logits(logits, np.packbits(allowed, axis=1, bitorder="little"))
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("rotary_dim", [2, 6, 20, 24])
def test_rotation_equals_torch_on_a_view_of_wider_rows(ops: LayerOps, rotary_dim: int):
    wide = normal(5, 4 * 24)
    expected = wide.clone()
    angles = normal(5, 1, rotary_dim // 2, seed=1)
    cos = torch.cat([angles.cos()] * 2, dim=-1)
    sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
    ops.rotate(wide[:, 24:72].view(5, 2, 24), cos, sin)
    LayerOps().rotate(expected[:, 24:72].view(5, 2, 24), cos, sin)
    assert_near(wide, expected)


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("in_features", [1, 40, 256, 257, 2048])
@pytest.mark.parametrize("rows", [0, 1, 2, 13, 14, 15, 16, 57, 300])
def test_products_are_accurate_against_float64(
    native_products: None, rows: int, in_features: int, bias: bool
):
    kernels = load_kernels()
    x, weight = normal(rows, in_features + 3)[:, :in_features], normal(96, in_features, seed=1)
    added = normal(96, seed=2) if bias else None
    packed = kernels.pack_linear(weight)
    assert packed is not None
    actual = kernels.linear(packed, x, added)
    exact = nn.functional.linear(
        x.double(), weight.double(), None if added is None else added.double()
    )
    # Sums of n products of unit normals: magnitude sqrt(n), each rounded n / 256 + 256 times.
    torch.testing.assert_close(
        actual.double(), exact, atol=3e-6 * in_features**0.5 + 1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("sizes", [[1], [2, 1, 14], [3, 200, 1, 65, 64]])
def test_grouped_products_equal_separate_products(native_products: None, sizes: list[int]):
    kernels = load_kernels()
    weights = [kernels.pack_linear(normal(96, 300, seed=n)) for n in range(len(sizes))]
    x = normal(sum(sizes), 300, seed=9)
    packed = [weight for weight in weights if weight is not None]
    expected = [
        kernels.linear(weight, rows, None)
        for weight, rows in zip(packed, x.split(sizes), strict=True)
    ]
    assert torch.equal(kernels.linear_groups(packed, x, sizes), torch.cat(expected))
    with pytest.raises(ValueError, match="weights of one shape"):
        kernels.linear_groups(packed, x[1:], sizes)


@needs_kernels
def test_unsupported_products_use_onednn(ops: LayerOps, monkeypatch: pytest.MonkeyPatch):
    odd, even = normal(33, 8), normal(64, 8)
    assert load_kernels().pack_linear(odd) is None
    x = normal(3, 8, seed=1)
    assert_near(ops.pack_weight(odd).multiply(x, None), x @ odd.T)
    monkeypatch.setattr(load_kernels(), "has_linear", False)
    assert load_kernels().pack_linear(even) is None
    assert_near(ops.pack_weight(even).multiply(x, None), x @ even.T)


def test_deterministic_products_and_activations_round_a_row_alike(native_products: None):
    exact, odd, bias = NativeLayerOps(load_kernels(), deterministic=True), normal(33, 8), normal(33)
    x, wide = normal(70, 8, seed=1), normal(700, 96, seed=2)
    multiply = exact.pack_weight(odd).multiply
    for added in (None, bias):
        together = multiply(x, added)
        assert_near(together, nn.functional.linear(x, odd, added))
        assert torch.equal(torch.cat([multiply(row[None], added) for row in x]), together)
    activated = exact.each(nn.functional.gelu, wide)
    assert torch.equal(
        torch.cat([exact.each(nn.functional.gelu, w[None]) for w in wide]), activated
    )
    assert_near(activated, nn.functional.gelu(wide))
    odd = normal(7, 33)
    assert torch.equal(
        torch.cat([exact.each(torch.sigmoid, row[None]) for row in odd]),
        exact.each(torch.sigmoid, odd),
    )


@needs_kernels
def test_unsupported_inputs_are_refused():
    kernels = load_kernels()
    with pytest.raises(ValueError, match=r"contiguous float32 on a CPU, got torch\.float64"):
        kernels.gated_silu(normal(2, 4).double())
    with pytest.raises(ValueError, match="strides"):
        kernels.rms_norm(normal(4, 6).T, normal(4), 1e-6)
    with pytest.raises(ValueError, match="weight is"):
        kernels.rms_norm(normal(4, 6), normal(5), 1e-6)
    if kernels.has_linear:
        packed = kernels.pack_linear(normal(32, 5))
        assert packed is not None
        with pytest.raises(ValueError, match="expected float32 rows of 5"):
            kernels.linear(packed, normal(2, 4), None)
    with pytest.raises(ValueError, match="two halves"):
        kernels.gated_silu(normal(2, 5))
    with pytest.raises(ValueError, match="take no cos"):
        kernels.rotate(normal(2, 1, 4), normal(2, 1, 6), normal(2, 1, 6))
    with pytest.raises(ValueError, match=r"logits \(2, 33\) take no uint8 bits \(2, 4\)"):
        kernels.mask_logits(normal(2, 33), np.zeros((2, 4), np.uint8))


def test_spans_accept_empty_tables_and_refuse_unsupported_layouts():
    spans = torch.zeros(3, 2, dtype=torch.int32)
    # Like the step inputs of encoders without cached blocks: all strides are 0.
    empty = torch.from_numpy(np.zeros((2, 0), dtype=np.int32))
    assert PagedSpans(empty, spans).num_parts == 1
    table = torch.zeros(2, 4, dtype=torch.int32)
    for bad in (table.long(), table[:, ::2], table[0]):
        with pytest.raises(ValueError, match="contiguous int32 block table"):
            PagedSpans(bad, spans)
    for bad in (spans.long(), spans[:2], spans.T.contiguous().T):
        with pytest.raises(ValueError, match=r"int32 spans \(3, num_tokens\)"):
            PagedSpans(table, bad)


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without optimization; tests of the build do not need fast kernels."""
    monkeypatch.setattr(native.kernels, "_FLAGS", (*native.kernels._FLAGS, "-O0"))


@needs_compiler
@pytest.mark.usefixtures("quick_compiler")
def test_a_library_is_built_once_and_again_when_the_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMNI_CACHE_DIR", str(tmp_path))
    first = compile_kernels()
    built = first.stat().st_mtime_ns
    assert compile_kernels() == first
    assert first.stat().st_mtime_ns == built
    changed = tmp_path / "kernels.c"
    changed.write_bytes(native.kernels.SOURCES[0].read_bytes() + b"\n")
    monkeypatch.setattr(native.kernels, "SOURCES", (changed, *native.kernels.SOURCES[1:]))
    assert compile_kernels() != first
    assert len(list((tmp_path / "native").glob("*/kernels.so"))) == 2


@needs_compiler
def test_libraries_of_a_wheel_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    setup.build_kernels(tmp_path, "-O0")
    monkeypatch.setattr(native.kernels, "FOLDER", tmp_path)
    monkeypatch.setenv("CC", "no-such-cc")
    own = set(native.kernels._cpu_features().split())
    fitting = [each for each in tmp_path.iterdir() if set(each.stem.split("+")) <= own]
    for library in fitting:
        assert NativeKernels(library).has_linear
    if fitting:
        assert compile_kernels() == max(fitting, key=lambda each: each.stem.count("+"))
    monkeypatch.setattr(native.kernels, "_cpu_features", lambda: "sse2")
    with pytest.raises(NativeBuildError, match="is no program"):
        compile_kernels()


@pytest.mark.parametrize(
    ("compiler", "message"), [("/bin/false", "exited with 1"), ("no-such-cc", "is no program")]
)
def test_a_failing_compiler_is_reported(
    compiler: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMNI_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(NativeBuildError, match=message):
        compile_kernels()


def test_a_library_that_does_not_load_is_reported(tmp_path: Path):
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NativeBuildError, match="do not load"):
        NativeKernels(broken)


@needs_kernels
def test_backend_and_layers_are_switched_together(qwen2_checkpoint: str):
    for name in ("native", "torch"):
        settings = {"model": qwen2_checkpoint, "device": "cpu", "max_model_len": 64}
        engine = LLMEngine(EngineConfig.model_validate(settings | {"attention_backend": name}))
        kernels = f", C kernels for {load_kernels().instructions}" if name == "native" else ""
        assert f"attention      {name}{kernels}" in engine.memory_plan.lines()


THREADS = [1, 2, 3, 7]


@needs_kernels
@pytest.mark.parametrize("threads", THREADS)
def test_every_piece_runs_once_in_each_of_many_jobs(threads: int):
    for job in range(68):
        seen: list[int] = []
        run_pieces(seen.append, job % 17, threads)
        assert Counter(seen) == Counter(range(job % 17))


@needs_kernels
def test_a_delayed_piece_delays_no_other():
    """With static shares, pieces after the delayed one in its share would wait."""
    others, seen = threading.Event(), []

    def piece(number: int) -> None:
        if number == 0:
            assert others.wait(PATIENCE_S)
        seen.append(number)
        if len(seen) == 19:
            others.set()

    run_pieces(piece, 20, 2)
    assert seen[-1] == 0 and sorted(seen) == list(range(20))


@needs_kernels
def test_concurrent_jobs_of_several_threads_all_finish():
    def job(first: int) -> list[int]:
        seen: list[int] = []
        for _ in range(20):
            run_pieces(lambda number: seen.append(first + number), 8, 3)
        return seen

    with ThreadPoolExecutor(4) as pool:
        for first, seen in enumerate(pool.map(job, range(0, 400, 100))):
            assert Counter(seen) == {100 * first + number: 20 for number in range(8)}


@needs_kernels
def test_a_late_member_takes_no_piece_of_a_half_replaced_job(tmp_path: Path):
    stress, sources = tmp_path / "stress", Path(__file__).with_name("team_stress.c")
    include = f"-I{ROOT / 'engine' / 'native'}"
    command = [find_compiler(), "-O2", "-pthread", include, str(sources), "-o", str(stress)]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [str(stress), "5000"], check=True, timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert done.stdout == "0\n"


@needs_kernels
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3", "aarch64"])
def test_kernels_are_correct_on_other_processors(processor: str, tmp_path: Path):
    """SSE2 only, AVX2, and NEON in an emulator."""
    if processor == "aarch64":
        cross, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
        if cross is None or emulator is None:
            pytest.skip("needs gcc-aarch64-linux-gnu and qemu-user")
        compiler, run = [cross, "-static"], [emulator]
    elif platform.machine() != "x86_64" or processor not in X86_LEVELS:
        pytest.skip(f"this processor does not run {processor}")
    else:
        compiler, run = [find_compiler(), f"-march={processor}"], []
    native, program = ROOT / "engine" / "native", tmp_path / "kernels"
    kernels = [str(native / f"{name}.c") for name in ("kernels", "linear", "quantized", "team")]
    checks = str(Path(__file__).with_name("other_processors.c"))
    sources = [checks, *kernels, "-lm", "-o", str(program)]
    # -O3 compiles three times as long, and the sources are what differs between processors.
    optimized = ["-O2", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
    subprocess.run([*compiler, *optimized, f"-I{native}", *sources], check=True)
    done = subprocess.run(
        [*run, str(program)], check=True, timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert done.stdout == "0\n"


@needs_kernels
def test_at_most_the_requested_number_of_threads_work():
    """Even if an earlier job left more team members."""
    run_pieces(lambda number: None, 64, 7)
    for _ in range(20):
        workers: set[int] = set()
        run_pieces(lambda number, workers=workers: workers.add(threading.get_native_id()), 64, 2)
        assert len(workers) <= 2


def results() -> list[Tensor]:
    """Return kernel results for inputs large enough to be split into pieces."""
    kernels, seeded = load_kernels(), torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=seeded)

    heads = normal(300, 4, 64)
    kernels.rotate(heads, normal(300, 1, 64), normal(300, 1, 64))
    made = [
        heads,
        kernels.rms_norm(normal(300, 256), normal(256), 1e-6),
        kernels.gated_silu(normal(300, 512)),
        kernels.snake(normal(2, 9, 700), normal(12), normal(12), normal(9), normal(9)),
    ]
    weight = kernels.pack_linear(normal(2048, 256))
    if weight is not None:  # without AVX-512, torch computes products
        made += [kernels.linear(weight, normal(rows, 256), normal(2048)) for rows in (3, 300)]
    return made


@needs_kernels
def test_results_do_not_depend_on_the_number_of_threads():
    before = torch.get_num_threads()
    try:
        made = []
        for threads in THREADS:
            torch.set_num_threads(threads)
            made.append(results())
    finally:
        torch.set_num_threads(before)
    for others in made[1:]:
        assert all(map(torch.equal, made[0], others))


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_has_its_own_team():
    """Use a separate program, since a fork of pytest would copy locks held by its threads."""
    program = (
        "import os, sys, torch\n"
        "from tests.support.native_kernels import run_pieces\n"
        "def total():\n"
        "    seen = []\n"
        "    run_pieces(seen.append, 64, 3)\n"
        "    return len(seen)\n"
        "assert total() == 64\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if total() == 64 else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0 and total() == 64\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)


@needs_kernels
def test_kernels_have_no_openmp():
    assert b"GOMP_" not in compile_kernels().read_bytes()
