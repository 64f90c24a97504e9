"""Nothing waits for xformers, and nothing misses it, unless its backend is asked for on CUDA."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable

from tests.support.import_graph import ROOT

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


def test_a_cpu_runs_without_it_and_asking_for_it_says_what_it_needs(
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
