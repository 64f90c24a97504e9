"""A pipeline over three nodes of a Ray cluster, all on this machine; a program of its own.

    python -m tests.support.three_nodes TRACE

A process is in one cluster at a time, and the one that tests are run in may be in another. ::

    writer ──rows, from one object store to another──► reader
    first node                                         second or third node, until that is lost,
                                                       and a fourth one, once that has come

Before that, on the same nodes, :mod:`~tests.support.speaking_nodes`; after it
:mod:`~tests.support.lost_together`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import ray
from ray.cluster_utils import Cluster

from omni import Omni, OmniOutput, OmniRequest, verify
from stages.cluster import reservation
from stages.remote.codec import INLINE_BYTES
from stages.remote.remote_stage import RemoteStage
from tests.support.lost_together import lose_together
from tests.support.patience import wait_for
from tests.support.same_outputs import assert_same
from tests.support.speaking_nodes import node_of, pid_of, speak_across

__all__ = ["main"]

_NODES = ("writer", "reader", "reader")
_PROMPTS = ["say it again " * 100, "hello there"]
_STORE_BYTES = 100 * 2**20
_ROWS = {"stages.writer.final_output": ["text", "tensors"]}


def main(trace: str) -> None:
    """Compare what is said with what is said inline, also when nodes are lost meanwhile."""
    with _cluster() as (cluster, nodes, add_node):
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
    for output in failed:
        assert output.error is not None
        print(output.error)
    # Some of it is too large for a message.
    largest = found[0].stages["writer"].tensors["hidden_states"]
    assert largest.nbytes > INLINE_BYTES, largest.nbytes


@contextmanager
def _cluster() -> Iterator[tuple[Any, dict[str, Any], Callable[[], object]]]:
    """The cluster, what removes each node but the first, and what adds one for a reader."""
    head, *others = (
        {"num_cpus": 1, "resources": {name: 1}, "object_store_memory": _STORE_BYTES}
        for name in _NODES
    )
    cluster: Any = Cluster(initialize_head=True, head_node_args=head | {"include_dashboard": False})
    try:
        added = [cluster.add_node(**node) for node in others]
        removals = {node.node_id: partial(cluster.remove_node, node) for node in added}
        yield cluster, removals, partial(cluster.add_node, **others[-1])
    finally:
        cluster.shutdown()


def _generate(omni: Omni, nodes: dict[str, Any] | None = None) -> list[OmniOutput]:
    """Run the prompts, and lose the reader's node, if that is asked for, when it has begun."""
    last: dict[str, OmniOutput] = {}
    long = {"reader": {"max_tokens": 100, "ignore_eos": True}}
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
    """Somebody else has what a reader needs, until one that was lost has missed it for a while."""

    class Other:
        """Of another pipeline, say."""

    remote: Any = ray.remote
    other = remote(num_cpus=0, resources={"reader": 1})(Other).remote()
    ray.get(other.__ray_ready__.remote())

    def go_when_missed() -> None:
        (worker,) = _reader(omni).workers
        wait_for(lambda: "has not been free on another one" in str(worker.state.last_end))
        ray.kill(other)

    thread = threading.Thread(target=go_when_missed)
    with patch.object(reservation, "_PLACED_WITHIN_S", 1.0):
        thread.start()
        yield
        thread.join()


def _reader(omni: Omni) -> RemoteStage:
    stage = omni.pipeline.stages["reader"]
    assert isinstance(stage, RemoteStage)
    return stage


def _lose_node(omni: Omni, nodes: dict[str, Any]) -> None:
    """As when its machine loses power: with all of its processes at once."""
    pid = pid_of(omni, "reader")
    there = node_of(pid)
    os.kill(pid, signal.SIGSTOP)  # what it says meanwhile is not heard
    nodes.pop(there)()
    with suppress(ProcessLookupError):  # its raylet may have taken it along
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
