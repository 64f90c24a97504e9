"""A pipeline that speaks, composed in Python, with each of its stages on a node of a Ray cluster.

Its pools hold one long request and a bit: those that run side by side preempt each other, and what
is cached gives way. All edges stream, and some requests are aborted on their way, one by stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ray
import torch

from omni import Omni, OmniOutput, OmniRequest, Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from omni.pipelines.runtime_config import RuntimeConfig
from stages.remote.remote_stage import RemoteStage
from tests.support.omni_stages import assert_same

__all__ = ["node_of", "pid_of", "speak_across"]

_STAGES = ("thinker", "talker", "code2wav")
_PREEMPTING = ("thinker", "talker")
_PROMPTS = [f"What did {name} say?" for name in ("the fox", "a dog", "it", "no one")]
_STOPPED = {f"What is with {name}?": name for name in _STAGES}
"""At the first output of which stage they are aborted."""

_USUAL: dict[str, Any] = {"block_size": 4, "max_model_len": 60, "max_num_seqs": 4}
_SMALL = _USUAL | {"num_blocks": 17, "max_num_batched_tokens": 16}


def speak_across(address: str, nodes: Sequence[str]) -> None:
    """Compare what is said with what is said inline, with room for all."""
    with Omni(_composed(_USUAL)) as omni:
        expected = _spoken(omni)
    places = {
        f"stages.{name}.placement.node": node for name, node in zip(_STAGES, nodes, strict=True)
    }
    places["runtime.kind"] = "ray"  # or a file could not name nodes
    runtime = RuntimeConfig(kind="ray", address=address)
    with Omni(_composed(_SMALL, places), runtime=runtime) as omni:
        stages = omni.pipeline.stages.values()
        assert [node_of(pid_of(omni, name)) for name in _STAGES] == [*nodes]
        for _ in range(2):
            for prompt, output in _spoken(omni, _STOPPED).items():
                assert_same(output, expected[prompt])
            with omni.paused():
                for stage in stages:
                    assert not stage.has_unfinished_requests
                    stage.check_integrity()
        counted = omni.stats()
        for name in _PREEMPTING:
            assert counted[name].num_preemptions, f"{name} preempted nothing"
            kv = counted[name].kv
            assert kv is not None and kv.evictions, f"{name} evicted nothing"


def pid_of(omni: Omni, name: str) -> int:
    """The process of a stage's only worker."""
    stage = omni.pipeline.stages[name]
    assert isinstance(stage, RemoteStage)
    (worker,) = stage.workers
    assert worker.pid is not None
    return worker.pid


def node_of(pid: int) -> str:
    """The id of the node that an actor is on, by its process."""
    listed = ray._private.state.actors().values()
    (there,) = (
        actor["Address"]["NodeID"]
        for actor in listed
        if actor["State"] == "ALIVE" and actor["Pid"] == pid
    )
    return str(there)


def _composed(engine: dict[str, Any], places: dict[str, Any] | None = None) -> Pipeline:
    changes: dict[str, Any] = dict(places or {})
    for name in _PREEMPTING:
        changes |= {f"stages.{name}.engine.{key}": value for key, value in engine.items()}
        changes |= {f"stages.{name}.sampling": {"temperature": 0.0, "logprobs": 2}}
    changes |= {"stages.talker.inputs.chunk_size": 2, "stages.talker.final_output": "text"}
    changes |= {"stages.code2wav.generation.num_steps": 2}
    config = PipelineConfig.load("omni_speech", overrides=changes)
    return Pipeline([stage.build_stage(name) for name, stage in config.stages.items()])


def _request(prompt: str, num_text: int, num_codes: int) -> OmniRequest:
    lengths = {"thinker": num_text, "talker": num_codes}
    asked = {name: {"max_tokens": n, "ignore_eos": True} for name, n in lengths.items()}
    return OmniRequest(prompt, prompt, sampling=asked)


def _spoken(omni: Omni, stopped: Mapping[str, str] = MappingProxyType({})) -> dict[str, OmniOutput]:
    """The last outputs by prompt, less those of requests that are aborted; see :data:`_STOPPED`."""
    requests = [_request(prompt, 16, 24) for prompt in _PROMPTS]
    requests += [_request(prompt, 40, 44) for prompt in stopped]
    heard: dict[str, list[torch.Tensor]] = {prompt: [] for prompt in (*_PROMPTS, *stopped)}
    last: dict[str, OmniOutput] = {}
    for output in omni.stream(requests):
        last[output.request_id] = output
        piece = output.stages.get("code2wav")
        if piece is not None and piece.audio_delta is not None:
            heard[output.request_id].append(piece.audio_delta.samples)
        if stopped.get(output.request_id) in output.stages:
            omni.abort(output.request_id)
    for prompt in stopped:
        assert last.pop(prompt).error == "aborted"
    for prompt, output in last.items():
        audio = output.stages["code2wav"].audio
        assert len(heard[prompt]) > 1, "it came in one piece"
        assert audio is not None and torch.equal(torch.cat(heard[prompt]), audio.samples)
    return last
