"""Offloaded blocks outlive pool and process, and hit only under the same model and settings."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EncoderEngine, EngineConfig, LLMEngine, RequestOutput, TokensPrompt
from engine.interface.sampling_params import SamplingParams
from tests.support.patience import PATIENCE_S

PROMPT = TokensPrompt(tuple(range(20, 84)))
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
Build = Callable[..., LLMEngine]


def config_of(model: str, folder: Path | None, **more: Any) -> EngineConfig:
    disk: dict[str, Any] = {"path": str(folder), "bytes": 2**26}
    return EngineConfig(
        **{
            "model": model,
            "block_size": 4,
            "num_blocks": 40,
            "max_num_batched_tokens": 32,
            "max_num_seqs": 2,
            "max_model_len": 100,
            "offload": None if folder is None else {"disk": disk},
        }
        | more
    )


def ask(engine: LLMEngine) -> RequestOutput:
    (output,) = engine.generate([PROMPT], PARAMS)
    engine.check_integrity()
    return output


def run_once(model: str, folder: Path | None, **more: Any) -> RequestOutput:
    """Answer with a new engine, and close it."""
    engine = LLMEngine(config_of(model, folder, **more))
    output = ask(engine)
    engine.close()
    return output


def assert_equal(one: RequestOutput, other: RequestOutput) -> None:
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert one.outputs[0].tensors.keys() == other.outputs[0].tensors.keys()
    for name, rows in one.outputs[0].tensors.items():
        torch.testing.assert_close(rows, other.outputs[0].tensors[name], atol=1e-5, rtol=0)


def test_a_new_engine_hits_what_an_earlier_one_left(
    seeded: Callable[[str], str], tmp_path: Path
) -> None:
    model = seeded("qwen2")
    plain, first, second = run_once(model, None), *(run_once(model, tmp_path) for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 60)
    assert_equal(plain, first)
    assert_equal(plain, second)


def test_blocks_of_other_weights_or_settings_are_not_hit(
    seeded: Callable[[str], str], tmp_path: Path
) -> None:
    folder, other = tmp_path / "blocks", tmp_path / "other"
    model = seeded("qwen2")
    run_once(model, folder)
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    name = next(iter(weights))
    weights[name][0] += 0.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    assert run_once(str(other), folder).num_cached_tokens == 0
    for more in ({"dtype": "bfloat16"}, {"block_size": 8}, {"attention_backend": "torch"}):
        assert run_once(model, folder, **more).num_cached_tokens == 0
    assert run_once(model, folder).num_cached_tokens == 60


def test_a_reset_forgets_what_is_on_disk(seeded: Callable[[str], str], tmp_path: Path) -> None:
    engine = LLMEngine(config_of(seeded("qwen2"), tmp_path))
    ask(engine)
    engine.reset_prefix_cache()
    assert ask(engine).num_cached_tokens == 0
    assert ask(engine).num_cached_tokens == 60
    engine.close()


def test_a_folder_that_vanishes_costs_hits_only(
    seeded: Callable[[str], str], tmp_path: Path
) -> None:
    plain = run_once(seeded("qwen2"), None)
    engine = LLMEngine(config_of(seeded("qwen2"), tmp_path / "blocks"))
    ask(engine)
    assert engine._offloaded is not None and engine._offloaded.disk is not None
    engine._offloaded.disk.flush(PATIENCE_S)
    shutil.rmtree(tmp_path / "blocks")
    engine._kv.reset_prefix_cache()
    assert_equal(plain, ask(engine))
    engine._kv.reset_prefix_cache()
    assert ask(engine).num_cached_tokens == 60  # written once more
    engine.close()


def test_a_full_disk_costs_hits_only(
    seeded: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    plain = run_once(seeded("qwen2"), None)
    monkeypatch.setattr(os, "replace", full)
    engine = LLMEngine(config_of(seeded("qwen2"), tmp_path))
    for _ in range(2):
        assert_equal(plain, ask(engine))
        engine._kv.reset_prefix_cache()
    stats = engine.stats().offload
    engine.close()
    assert stats is not None and stats.stored
    assert not list(tmp_path.rglob("*.block"))


RUNNER = """
import sys
from pathlib import Path
from tests.engine.llm.test_offload import PARAMS, ask, config_of
from engine import LLMEngine, TokensPrompt
engine = LLMEngine(config_of(sys.argv[1], Path(sys.argv[2])))
print("ready", flush=True)
for first in range(10**6):
    for shared in (20, 30):
        engine.generate([TokensPrompt((*range(shared, shared + 40), 100 + first % 500))], PARAMS)
"""


def test_engines_killed_over_one_folder_leave_right_rows(
    seeded: Callable[[str], str], tmp_path: Path
) -> None:
    """Two processes run the same prompts over one folder until they are killed."""
    model = seeded("qwen2")
    plain = run_once(model, None)
    runners = [
        subprocess.Popen(
            [sys.executable, "-c", RUNNER, model, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for runner in runners:
        assert runner.stdout is not None and runner.stdout.readline() == "ready\n"
    while len(list(tmp_path.rglob("*.block"))) < 25:
        assert all(runner.poll() is None for runner in runners)
    for runner in runners:
        runner.send_signal(signal.SIGKILL)
        runner.communicate()
    output = run_once(model, tmp_path)
    assert output.num_cached_tokens == 40
    assert_equal(plain, output)


def test_host_memory_below_a_pool_in_host_memory_is_refused(seeded: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match="raise num_blocks instead"):
        LLMEngine(config_of(seeded("qwen2"), None, offload={"host_bytes": 2**20}))


def test_what_cannot_be_offloaded_is_refused(seeded: Callable[[str], str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an encoder engine has none"):
        EncoderEngine(config_of(seeded("bert"), tmp_path))
    with pytest.raises(ValueError, match="offload needs host_bytes, or disk"):
        config_of("x", None, offload={})
    with pytest.raises(ValueError, match="leave one of the two out"):
        config_of("x", tmp_path, enable_prefix_caching=False)


def test_the_plan_says_where_blocks_go(seeded: Callable[[str], str], tmp_path: Path) -> None:
    engine = LLMEngine(config_of(seeded("qwen2"), tmp_path))
    assert f"offload        up to 64.0 MiB on disk in {tmp_path}" in engine.memory_plan.lines()
    engine.close()
