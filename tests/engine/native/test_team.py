"""The kernels' team of threads: every piece once, nobody waited for in vain, no OpenMP."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.native import load_kernels
from engine.native.kernels import compile_kernels, find_compiler
from tests.support.import_graph import ROOT
from tests.support.native_kernels import needs_kernels
from tests.support.patience import PATIENCE_S

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
THREADS = [1, 2, 3, 7]

pytestmark = needs_kernels


def run(piece: Callable[[int], None], pieces: int, threads: int) -> None:
    """A job whose pieces are calls of a Python function."""
    library = ctypes.CDLL(str(compile_kernels()))
    library.omni_team_run(
        WORK(lambda _, number: piece(number)), None, ctypes.c_int64(pieces), threads
    )


@pytest.mark.parametrize("threads", THREADS)
def test_every_piece_runs_once_in_each_of_many_jobs(threads: int):
    for job in range(200):
        seen: list[int] = []
        run(seen.append, job % 17, threads)
        assert Counter(seen) == Counter(range(job % 17))


def test_a_delayed_piece_delays_no_other():
    """With shares handed out in advance, those after the delayed piece in its share would wait."""
    others, seen = threading.Event(), []

    def piece(number: int) -> None:
        if number == 0:
            assert others.wait(PATIENCE_S)
        seen.append(number)
        if len(seen) == 19:
            others.set()

    run(piece, 20, 2)
    assert seen[-1] == 0 and sorted(seen) == list(range(20))


def test_jobs_of_several_threads_at_once_are_all_done():
    def job(first: int) -> list[int]:
        seen: list[int] = []
        for _ in range(50):
            run(lambda number: seen.append(first + number), 8, 3)
        return seen

    with ThreadPoolExecutor(4) as pool:
        for first, seen in enumerate(pool.map(job, range(0, 400, 100))):
            assert Counter(seen) == {100 * first + number: 50 for number in range(8)}


def test_a_late_member_takes_no_piece_of_a_job_half_replaced(tmp_path: Path):
    stress, sources = tmp_path / "stress", Path(__file__).with_name("team_stress.c")
    include = f"-I{ROOT / 'engine' / 'native'}"
    command = [find_compiler(), "-O2", "-pthread", include, str(sources), "-o", str(stress)]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [str(stress), "20000"], check=True, timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert done.stdout == "0\n"


def test_at_most_as_many_threads_work_as_were_asked_for():
    """Also where an earlier job has left more members than that."""
    run(lambda number: None, 64, 7)
    for _ in range(20):
        workers: set[int] = set()
        run(lambda number, workers=workers: workers.add(threading.get_native_id()), 64, 2)
        assert len(workers) <= 2


def results() -> list[Tensor]:
    """What kernels make of inputs large enough to be cut into pieces."""
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
    if weight is not None:  # without AVX-512 products are torch's
        made += [kernels.linear(weight, normal(rows, 256), normal(2048)) for rows in (3, 300)]
    return made


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_has_a_team_of_its_own():
    """In a program of its own, since a fork of pytest would take its threads' locks along."""
    program = (
        "import os, sys, torch\n"
        "from tests.engine.native.test_team import run\n"
        "def total():\n"
        "    seen = []\n"
        "    run(seen.append, 64, 3)\n"
        "    return len(seen)\n"
        "assert total() == 64\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if total() == 64 else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0 and total() == 64\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)


def test_kernels_have_no_openmp():
    assert b"GOMP_" not in compile_kernels().read_bytes()
