"""Tests whose stages run on Ray run on three nodes: what is handed on goes from store to store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.experimental import get_object_locations

from omni import Omni
from omni.pipelines.pipeline import Pipeline
from stages.cluster.object_bytes import HeldObjects, ObjectBytes
from tests.support.omni_stages import Conversation, Turn, build_pipeline
from tests.support.patience import wait_for
from tests.support.ray_cluster import SessionCluster


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_the_stages_of_a_placed_pipeline_are_on_a_node_each_and_tensors_are_copied(
    ray_cluster: SessionCluster,
    place: Callable[[Pipeline, str], Pipeline],
    seeded: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    streaming: bool,
) -> None:
    assert len(ray_cluster.nodes) == 3
    references: list[Any] = []  # so that nothing is freed when it was read
    add = HeldObjects.add

    def adding(held: HeldObjects, member: ObjectBytes) -> None:
        references.append(member.reference)
        add(held, member)

    monkeypatch.setattr(HeldObjects, "add", adding)
    pipeline = place(build_pipeline(seeded("qwen2_5_omni"), streaming=streaming), "ray")
    with Omni(pipeline) as omni:
        (output,) = omni.generate(Conversation((Turn(),)).request("one"))
        assert output.error is None, output.error

        def nodes_of_each() -> list[set[str]]:
            return [set(told["node_ids"]) for told in get_object_locations(references).values()]

        # The thinker's rows lie where they were made, and where the talker has read them; the
        # sound where it was made, and here. The owner is told of each place in its own time.
        wait_for(lambda: set[str]().union(*nodes_of_each()) == {*ray_cluster.nodes})
        wait_for(lambda: any(len(nodes) > 1 for nodes in nodes_of_each()))


def test_what_goes_through_a_relay_goes_by_another_node(ray_cluster: SessionCluster) -> None:
    relay = ray_cluster.relay
    ray.get(relay.__ray_ready__.remote())
    told = ray._private.state.actors(relay._actor_id.hex())
    assert told["Address"]["NodeID"] in ray_cluster.nodes[1:]
    assert ray.get_runtime_context().get_node_id() == ray_cluster.nodes[0]
