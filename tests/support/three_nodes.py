"""A pipeline over three nodes of a Ray cluster, all on this machine; a separate program.

    python -m tests.support.three_nodes TRACE PROGRAM

Actors are forked from the nursery whose client ``PROGRAM`` is, see :mod:`~tests.support.ray_head`:
starting them from nothing is tested in the clusters of ``omni run``.

A process is in one cluster at a time, and the process of the tests may be in another. ::

    writer ──rows, from one object store to another──► reader
    first node                                         second or third node, until that is lost,
                                                       and a fourth one, once that has come

Before that, on the same nodes, a speech pipeline runs with each of its stages on one: its pools
hold one long request and a bit, so that concurrent requests preempt each other and cached blocks
are evicted; all edges stream, and some requests are aborted midway, one per stage. After it, two
stages lose their nodes, and one of them has no other node to run on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import ray
import torch
from ray.cluster_utils import Cluster

from omni import Omni, OmniOutput, OmniRequest, Pipeline, verify
from omni.pipelines.pipeline_config import PipelineConfig
from omni.pipelines.runtime_config import RuntimeConfig
from stages.cluster import reservation
from stages.remote import supervisor
from stages.remote.codec import INLINE_BYTES
from stages.remote.remote_stage import RemoteStage
from tests.support import omni_stages, ray_head
from tests.support.patience import PATIENCE_S, wait_for
from tests.support.remote_stages import pids_of
from tests.support.same_outputs import assert_same

_STAGES = ("thinker", "talker", "code2wav")
_PREEMPTING = ("thinker", "talker")
_SAID = [f"What did {name} say?" for name in ("the fox", "a dog", "it", "no one")]
_STOPPED = {f"What is with {name}?": name for name in _STAGES}
"""The stage at whose first output they are aborted."""

_USUAL: dict[str, Any] = {"block_size": 4, "max_model_len": 60, "max_num_seqs": 4}
_SMALL = _USUAL | {"num_blocks": 17, "max_num_batched_tokens": 16}


def speak_across(address: str, nodes: Sequence[str]) -> None:
    """Compare the output with that of an inline run with ample memory."""
    with Omni(_composed(_USUAL)) as omni:
        expected = _spoken(omni)
    places = {
        f"stages.{name}.placement.node": node for name, node in zip(_STAGES, nodes, strict=True)
    }
    places["runtime.kind"] = "ray"  # or a file could not name nodes
    runtime = RuntimeConfig(kind="ray", address=address)
    with Omni(_composed(_SMALL, places), runtime=runtime) as omni:
        stages = omni.pipeline.stages.values()
        assert [node_of(pid) for name in _STAGES for pid in pids_of(omni, name)] == [*nodes]
        for _ in range(2):
            for prompt, output in _spoken(omni, _STOPPED).items():
                omni_stages.assert_same(output, expected[prompt])
            with omni.paused():
                for stage in stages:
                    assert not stage.has_unfinished_requests
                    stage.check_integrity()
        counted = omni.stats()
        for name in _PREEMPTING:
            assert counted[name].num_preemptions, f"{name} preempted nothing"
            kv = counted[name].kv
            assert kv is not None and kv.evictions, f"{name} evicted nothing"


def node_of(pid: int) -> str:
    """Return the id of the node of an actor, by its process."""
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
    """Return the last outputs by prompt, without aborted requests; see :data:`_STOPPED`."""
    requests = [_request(prompt, 16, 24) for prompt in _SAID]
    requests += [_request(prompt, 40, 44) for prompt in stopped]
    heard: dict[str, list[torch.Tensor]] = {prompt: [] for prompt in (*_SAID, *stopped)}
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
        assert audio is not None and torch.equal(torch.cat(heard[prompt]), audio.samples)
    return last


_SPECIAL = {"num_cpus": 2, "resources": {"special": 1}, "object_store_memory": 100 * 2**20}
_PLACES = {
    "stages.writer.placement.num_cpus": 1,
    "stages.reader.placement.num_cpus": 1,
    "stages.reader.placement.resources": {"special": 1},
    "stages.writer.sampling.max_tokens": 900,
    "stages.writer.sampling.ignore_eos": True,
    "stages.writer.engine.max_model_len": 1000,
    "runtime.kind": "ray",
}


def lose_together(cluster: Any) -> None:
    """Lose the nodes while one stage has requests, which end and report what has no node left."""
    node = cluster.add_node(**_SPECIAL)
    reported: list[str | None] = []
    with Omni("two_step", overrides=_PLACES | {"runtime.address": cluster.address}) as omni:

        def ask() -> None:
            for output in omni.stream([OmniRequest(f"{number} times") for number in range(32)]):
                has_begun.set()
                if output.finished:
                    reported.append(output.error)

        has_begun = threading.Event()
        thread = threading.Thread(target=ask)
        thread.start()
        assert has_begun.wait(PATIENCE_S)
        with patch.object(supervisor, "_FIRST_DELAY_S", 0.01):
            cluster.remove_node(node)
            thread.join(PATIENCE_S)
            wait_for(lambda: all(_state(omni, name) == "waiting" for name in ("writer", "reader")))
        (later,) = omni.generate(["hello"])
        reported.append(later.error)
    for error in reported:
        assert error is not None and "special" in error, reported
    assert "stage 'reader' was lost with it" in str(reported[0]), reported


def _state(omni: Omni, stage: str) -> str:
    (worker,) = omni.worker_states()[stage]
    return worker.state


_NODES = ("writer", "reader", "reader")
_PROMPTS = ["say it again " * 100, "hello there"]
_STORE_BYTES = 100 * 2**20
_ROWS = {"stages.writer.final_output": ["text", "tensors"]}


def main(trace: str, program: str) -> None:
    """Compare the output with that of an inline run, also when nodes are lost meanwhile."""
    os.environ.update(ray_head.QUIET)
    with (
        patch.object(sys, "executable", program),
        _cluster() as (cluster, nodes, add_node),
    ):
        address: str = cluster.address
        speak_across(address, (cluster.head_node.node_id, *nodes))
        places: dict[str, Any] = {
            f"stages.{name}.placement.resources": {name: 1} for name in set(_NODES)
        }
        places |= {"runtime.kind": "ray", "runtime.address": address}
        with Omni("two_step", overrides=places | _ROWS, trace=trace) as omni:
            assert len([node for node in ray.nodes() if node["Alive"]]) == len(_NODES)
            found = _generate(omni)
            again = _generate(omni)
            assert omni.stats()["writer"].cached_tokens and omni.stats()["reader"].cached_tokens
            report = verify(omni, _PROMPTS)
            assert report.equal, report
            with _crowd_that_goes(omni):
                moved = _generate(omni, nodes)
            with omni.paused() as pipeline:
                for stage in pipeline.stages.values():
                    stage.check_integrity()
            failed = _generate(omni, nodes)
            add_node()
            (worker,) = _reader(omni).workers
            wait_for(lambda: worker.is_up)
            back = _generate(omni)
        assert not ray.is_initialized()
        lose_together(cluster)
    with Omni("two_step", overrides=_ROWS) as omni:
        expected = _generate(omni)
    for outputs in (found, again, moved, back):
        assert_same(outputs, expected)
    for output, right in zip(failed, expected, strict=True):
        if output.error is None:  # results completed before the node is lost are kept
            assert_same([output], [right])
        else:
            print(output.error)
    # Some of it is too large for a message.
    largest = found[0].stages["writer"].tensors["hidden_states"]
    assert largest.nbytes > INLINE_BYTES, largest.nbytes


@contextmanager
def _cluster() -> Iterator[tuple[Any, dict[str, Any], Callable[[], object]]]:
    """Yield the cluster, what removes each node but the first, and what adds one for a reader."""
    head, *others = (
        {"num_cpus": 1, "resources": {name: 1}, "object_store_memory": _STORE_BYTES}
        | {"include_log_monitor": False}
        for name in _NODES
    )
    alone = {"include_dashboard": False, "no_monitor": True}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head | alone)
    try:
        added = [cluster.add_node(**node) for node in others]
        removals = {node.node_id: partial(cluster.remove_node, node) for node in added}
        yield cluster, removals, partial(cluster.add_node, **others[-1])
    finally:
        cluster.shutdown()


def _generate(omni: Omni, nodes: dict[str, Any] | None = None) -> list[OmniOutput]:
    """Run the prompts, and lose the reader's node, if given, once it has begun."""
    last: dict[str, OmniOutput] = {}
    long = {"reader": {"max_tokens": 300, "ignore_eos": True}}
    for output in omni.stream([OmniRequest(text, text, sampling=long) for text in _PROMPTS]):
        if nodes is not None and "reader" in output.stages:
            _lose_node(omni, nodes)
            nodes = None
        if output.finished:
            last[output.request_id] = output
    assert nodes is None, "nothing was lost"
    return [last[text] for text in _PROMPTS]


@contextmanager
def _crowd_that_goes(omni: Omni) -> Iterator[None]:
    """Occupy a reader's resources until a lost one has missed them for a while."""

    class Other:
        """An actor of another application."""

    remote: Any = ray.remote
    other = remote(num_cpus=0, resources={"reader": 1})(Other).remote()
    ray.get(other.__ray_ready__.remote())

    def go_when_missed() -> None:
        (worker,) = _reader(omni).workers
        wait_for(lambda: "has not been free on another one" in str(worker.state.last_end))
        ray.kill(other)

    thread = threading.Thread(target=go_when_missed)
    with patch.object(reservation, "_PLACE_TIMEOUT_S", 1.0):
        thread.start()
        yield
        thread.join()


def _reader(omni: Omni) -> RemoteStage:
    stage = omni.pipeline.stages["reader"]
    assert isinstance(stage, RemoteStage)
    return stage


def _lose_node(omni: Omni, nodes: dict[str, Any]) -> None:
    """Lose a node as on a power failure: with all of its processes at once."""
    (pid,) = pids_of(omni, "reader")
    there = node_of(pid)
    os.kill(pid, signal.SIGSTOP)  # its messages from now on are not received
    nodes.pop(there)()
    with suppress(ProcessLookupError):  # its raylet may have ended it already
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
