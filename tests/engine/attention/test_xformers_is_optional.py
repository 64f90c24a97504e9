"""Nothing waits for xformers, and nothing misses it, unless its backend is asked for on CUDA."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.import_graph import ROOT

RUN = """
import sys
{before}
from engine import EngineConfig, LLMEngine, SamplingParams
engine = LLMEngine(EngineConfig(model={model!r}, num_blocks=16, attention_backend={backend!r}))
engine.generate("a b c", SamplingParams(max_tokens=2))
assert sys.modules.get("xformers") is None, "imported"
"""


@pytest.mark.parametrize("installed", [True, False])
def test_a_model_runs_on_a_cpu_without_it(seeded, installed: bool) -> None:
    before = "" if installed else "sys.modules['xformers'] = None"
    code = RUN.format(before=before, model=seeded("qwen2"), backend="auto")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_asking_for_it_without_cuda_says_so(seeded) -> None:
    code = RUN.format(before="", model=seeded("qwen2"), backend="xformers")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "the xformers backend runs on CUDA devices only" in done.stderr
