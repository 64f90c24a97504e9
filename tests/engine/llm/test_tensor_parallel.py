"""Tensor parallelism: two processes compute what one computes, and end together."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import (
    EmbedsPrompt,
    EncoderEngine,
    EngineConfig,
    LLMEngine,
    Prompt,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)
from engine.execution.tensor_parallel import FollowerPages
from engine.interface.engine import EngineBrokenError
from omni import Omni, OmniRequest, PipelineConfig
from prefix_cache import PagedMemory
from tests.engine.promises.test_every_family import FAMILIES
from tests.support.import_graph import ROOT
from tests.support.model_trial import TRIALS
from tests.support.patience import PATIENCE_S, wait_for
from tests.support.speech import cut, made_up

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = (
    TokensPrompt(tuple(range(60, 73))),
    EmbedsPrompt(torch.randn(13, 64, generator=torch.Generator().manual_seed(0))),
)
# One per kind of layer: biases; windows and norms of heads; experts; rows of towers.
DIVIDED = ("qwen2", "gemma3", "qwen3_moe", "qwen3_vl")
REFUSED = {
    **dict.fromkeys(("jamba", "bamba", "qwen3_next", "qwen3_5"), "has recurrent layers"),
    **dict.fromkeys(("bart", "t5", "whisper", "mllama"), "has an encoder"),
}


def build(model: str, size: int = 2, **settings: Any) -> LLMEngine:
    sized = {"block_size": 4, "num_blocks": 20, "max_num_seqs": 4, "max_model_len": 64}
    return LLMEngine(EngineConfig(model=model, tensor_parallel=size, **(sized | settings)))


def children(engine: LLMEngine) -> list[int]:
    assert engine._followers is not None
    return [process.pid for process in engine._followers._processes]


def assert_near(found: RequestOutput, expected: RequestOutput) -> None:
    assert found.error is None
    mine, other = found.outputs[0], expected.outputs[0]
    assert mine.token_ids == other.token_ids
    for name, rows in other.tensors.items():
        torch.testing.assert_close(mine.tensors[name], rows, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def whole(qwen2_checkpoint: str) -> Iterator[LLMEngine]:
    with closing(build(qwen2_checkpoint, 1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def divided(qwen2_checkpoint: str) -> Iterator[LLMEngine]:
    with closing(build(qwen2_checkpoint)) as engine:
        yield engine


@pytest.mark.parametrize("name", DIVIDED)
def test_two_processes_give_the_output_of_one(name: str, seeded: Callable[[str], str]) -> None:
    trial = FAMILIES[name]
    assert trial.prompt is not None
    sized = {"part": trial.part, "num_blocks": 200, "max_model_len": None}
    outputs = []
    for size in (1, 2):
        with closing(build(seeded(trial.seeded), size, **sized)) as engine:
            prompt = trial.prompt()
            outputs.append([engine.generate([prompt], GREEDY)[0] for _ in range(2)])
    for found, expected in zip(*reversed(outputs), strict=True):
        assert_near(found, expected)
        assert found.num_cached_tokens == expected.num_cached_tokens


def test_a_talker_is_divided(seeded: Callable[[str], str], tmp_path: Path) -> None:
    """Its input is wider than its layers; the copy has enough key heads to divide."""
    folder = Path(shutil.copytree(seeded("qwen2_5_omni"), tmp_path / "talker"))
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.startswith("talker.") and (".k_proj." in name or ".v_proj." in name):
            weights[name] = torch.cat([weight, 0.5 * weight])
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["talker_config"]["num_key_value_heads"] = 2
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    chunks, outputs = cut(made_up(0, 9, 7), (3,)), []
    for size in (1, 2):
        with closing(build(str(folder), size, part="talker")) as engine:
            engine.add_request("a", chunks[0], GREEDY)
            for chunk in chunks[1:]:
                engine.step()
                engine.extend_request("a", chunk)
            while engine.has_unfinished_requests:
                moved = engine.step()
            outputs.append(moved[0])
    assert_near(*reversed(outputs))


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: type(prompt).__name__)
def test_several_completions_of_any_prompt(
    prompt: Prompt, whole: LLMEngine, divided: LLMEngine
) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True)
    found, expected = (engine.generate([prompt], params)[0] for engine in (divided, whole))
    assert [x.token_ids for x in found.outputs] == [x.token_ids for x in expected.outputs]
    assert len({x.token_ids for x in found.outputs}) > 1


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_formats_are_divided_too(qwen2_checkpoint: str, settings: dict[str, Any]) -> None:
    prompt, rows = TokensPrompt(tuple(range(50, 90))), []
    for size in (1, 2):
        with closing(build(qwen2_checkpoint, size, **settings)) as engine:
            rows.append(engine.generate([prompt], GREEDY)[0].outputs[0].tensors["hidden_states"])
    error = (rows[0][:40] - rows[1][:40]).float().norm() / rows[0][:40].float().norm()
    assert error < 0.02


def test_any_traffic_is_answered_as_by_one_process(whole: LLMEngine, divided: LLMEngine) -> None:
    draw, answers = random.Random(0), {}
    shared = [draw.randrange(10, 500) for _ in range(24)]
    prompts = [
        TokensPrompt(tuple(shared[: draw.randrange(24)] + draw.sample(range(10, 500), 9)))
        for _ in range(24)
    ]
    aborted = draw.sample(range(24), 4)
    for engine in (whole, divided):
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, GREEDY)
            for output in engine.step():
                answers[engine, output.request_id] = output
            if index in aborted:
                engine.abort(str(index))
            engine.check_integrity()
        while engine.has_unfinished_requests:
            for output in engine.step():
                answers[engine, output.request_id] = output
    assert divided.stats().num_preemptions, "the pool is too small for all"
    assert divided.stats().cached_tokens == whole.stats().cached_tokens > 0
    for index in set(range(24)) - set(aborted):
        assert_near(answers[divided, str(index)], answers[whole, str(index)])


def test_a_page_that_is_bad_in_another_process_is_noticed(
    divided: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert divided._followers is not None
    memory, page = divided._runner._memory, (0, 3)
    assert divided._followers.are_finite([page], True)
    bad = torch.full((4, divided.hidden_size), float("nan"))
    model = divided._runner._model
    with monkeypatch.context() as patch:
        patch.setattr(model, "embed", lambda ids: bad[: len(ids)])
        (output,) = divided.generate([TokensPrompt((7, 8, 9, 10))], GREEDY)
    assert output.error is not None and "NaN" in output.error
    pages = [(0, each) for each in range(1, 20)]
    for _, each in pages:
        PagedMemory.clear_page(memory, 0, each)  # the leader's alone
    assert not divided._followers.are_finite(pages, True)


def test_an_engine_that_loses_a_process_is_broken(qwen2_checkpoint: str) -> None:
    with closing(build(qwen2_checkpoint)) as engine:
        (pid,) = children(engine)
        engine.add_request("a", TokensPrompt((7, 8, 9)), GREEDY)
        engine.step()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError):
            while True:
                engine.step()
        assert engine.is_broken
        with pytest.raises(EngineBrokenError):
            engine.add_request("b", TokensPrompt((7, 8, 9)), GREEDY)


def test_an_interrupted_step_ends_the_other_processes(
    qwen2_checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(build(qwen2_checkpoint)) as engine:
        (pid,) = children(engine)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("engine.models.decoders.decoder.DecoderLayer.forward", interrupted)
        engine.add_request("a", TokensPrompt((7, 8, 9)), GREEDY)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.is_broken
        assert not psutil.pid_exists(pid)


def test_a_stage_is_rebuilt_when_it_has_lost_a_process(qwen2_checkpoint: str) -> None:
    stage = {
        "kind": "autoregressive",
        "final_output": "text",
        "model": qwen2_checkpoint,
        "engine": {"tensor_parallel": 2, "max_model_len": 64, "num_blocks": 40},
        "sampling": {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True},
    }
    config = PipelineConfig.model_validate({"name": "divided", "stages": {"writer": stage}})
    with Omni(config) as omni:
        requests = [OmniRequest(str(each), f"The harbour {each}") for each in range(3)]
        expected = omni.generate(requests)
        followers = [
            x for x in psutil.Process().children() if "engine.llm.follower" in "".join(x.cmdline())
        ]
        for process in followers:
            process.kill()
        found = omni.generate(requests)
    assert followers
    for each, other in zip(found, expected, strict=True):
        assert each.error is None
        assert each.stages["writer"].token_ids == other.stages["writer"].token_ids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_child_of_a_fork_leaves_the_processes_alone(qwen2_checkpoint: str) -> None:
    program = (
        "import os, sys\n"
        "from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt\n"
        "engine = LLMEngine(EngineConfig(model=sys.argv[1], tensor_parallel=2, num_blocks=40,"
        " max_model_len=64))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    engine.close()\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "(output,) = engine.generate([TokensPrompt((7, 8))], SamplingParams(max_tokens=4))\n"
        "assert output.error is None\n"
    )
    command = [sys.executable, "-c", program, qwen2_checkpoint]
    subprocess.run(command, check=True, timeout=PATIENCE_S, cwd=ROOT)


def test_processes_end_with_the_one_that_leads(qwen2_checkpoint: str) -> None:
    program = (
        "import sys, time\n"
        "from engine import EngineConfig, LLMEngine\n"
        "engine = LLMEngine(EngineConfig(model=sys.argv[1], tensor_parallel=2, num_blocks=40,"
        " max_model_len=64))\n"
        "print(*[each.pid for each in engine._followers._processes], flush=True)\n"
        "time.sleep(3600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, qwen2_checkpoint], stdout=subprocess.PIPE, cwd=ROOT
    ) as leader:
        assert leader.stdout is not None
        pids = [int(pid) for pid in leader.stdout.readline().split()]
        leader.kill()
    assert pids
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_divided_are_refused(name: str, seeded: Callable[[str], str]) -> None:
    trial = TRIALS[name]
    with pytest.raises(ValueError, match=REFUSED[name]):
        build(seeded(trial.seeded), part=trial.part)


def test_an_encoder_engine_refuses_tensor_parallelism(bert_checkpoint: str) -> None:
    with pytest.raises(ValueError, match="tensor_parallel divides the layers of a decoder"):
        EncoderEngine(EngineConfig(model=bert_checkpoint, tensor_parallel=2))


def test_heads_that_cannot_be_shared_evenly_are_refused(qwen2_checkpoint: str) -> None:
    with pytest.raises(ValueError, match="tensor_parallel 3 does not divide num_attention_heads"):
        build(qwen2_checkpoint, 3)


@pytest.mark.parametrize(
    "settings", [{"deterministic": True}, {"preemption": "swap"}, {"offload": {"host_bytes": 1}}]
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel 2 .* {next(iter(settings))}"):
        EngineConfig(model="m", tensor_parallel=2, **settings)


def test_a_process_that_cannot_start_says_why(
    qwen2_checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os; os.write(1, b'there is no torch here'); raise SystemExit(3)"
    monkeypatch.setattr("engine.execution.tensor_parallel._PROGRAM", program)
    with pytest.raises(RuntimeError, match="of tensor_parallel: there is no torch here"):
        build(qwen2_checkpoint)


def test_a_process_that_cannot_hold_its_pages_says_why(
    qwen2_checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.llm.llm_engine.FollowerPages", lambda _: FollowerPages(10**12))
    with pytest.raises(RuntimeError, match="of tensor_parallel: ValueError: num_blocks"):
        build(qwen2_checkpoint)


def test_a_divided_stage_has_one_replica() -> None:
    stage = {
        "kind": "autoregressive",
        "model": "m",
        "placement": {"replicas": 2},
        "engine": {"tensor_parallel": 2},
        "final_output": "text",
    }
    with pytest.raises(ValueError, match="leave placement.replicas out"):
        PipelineConfig.model_validate({"name": "divided", "stages": {"writer": stage}})
