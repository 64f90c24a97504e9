"""A pipeline over three nodes of a Ray cluster, all on this machine; a program of its own.

    python -m tests.support.three_nodes

A process is in one cluster at a time, and the one that tests are run in may be in another.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.cluster_utils import Cluster

from omni import Omni
from stages.cluster.parcels import INLINE_BYTES
from tests.support.same_outputs import assert_same

__all__ = ["main"]

_STAGES = ("thinker", "talker", "code2wav")
_PROMPTS = ["say it again " * 100, "hello there"]
_STORE_BYTES = 100 * 2**20


def main() -> None:
    """Compare what it says with what it says inline; without a word if it is the same."""
    nodes: list[dict[str, Any]] = [
        {"num_cpus": 1, "resources": {name: 1}, "object_store_memory": _STORE_BYTES}
        for name in _STAGES
    ]
    cluster: Any = Cluster(
        initialize_head=True, head_node_args=nodes[0] | {"include_dashboard": False}
    )
    for node in nodes[1:]:
        cluster.add_node(**node)
    try:
        _compare(cluster.address)
    finally:
        cluster.shutdown()


def _compare(address: str) -> None:
    # Each stage needs what one node alone has.
    overrides: dict[str, Any] = {
        f"stages.{name}.placement.resources": {name: 1} for name in _STAGES
    }
    overrides |= {"runtime.kind": "ray", "runtime.address": address}
    rows = {"stages.thinker.final_output": ["text", "tensors"]}
    with Omni("omni_speech", overrides=overrides | rows) as omni:
        assert len([node for node in ray.nodes() if node["Alive"]]) == len(_STAGES)
        found = omni.generate(_PROMPTS)
        again = omni.generate(_PROMPTS)
        assert omni.stats()["thinker"].cached_tokens and omni.stats()["talker"].cached_tokens
        with omni.paused() as pipeline:
            for stage in pipeline.stages.values():
                stage.check_integrity()
    assert not ray.is_initialized()
    with Omni("omni_speech", overrides=rows) as omni:
        expected = omni.generate(_PROMPTS)
    assert_same(found, expected)
    assert_same(again, expected)
    # Some of it is too large for a message, and has gone from one object store to another.
    largest = found[0].stages["thinker"].tensors["hidden_states"]
    assert largest.nbytes > INLINE_BYTES, largest.nbytes


if __name__ == "__main__":
    main()
