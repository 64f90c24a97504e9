"""Tensors sent from actor to actor by a direct transport of Ray: the same outputs.

The one here uses files. Ray's own, NIXL, is tested where it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from omni import Omni, OmniOutput, OmniRequest, verify
from omni.pipelines.pipeline_config import PipelineConfig
from tests.support.file_transport import (
    FILES,
    num_fetched,
    num_offered,
    register_files,
    remove_files,
)
from tests.support.patience import wait_for
from tests.support.ray_cluster import SessionCluster
from tests.support.remote_stages import kill_workers, pids_of
from tests.support.same_outputs import assert_same

# Prompts whose rows are too large to travel in a message.
PROMPTS = [f"{'A quick brown fox jumps over the lazy dog. ' * 24} {end}" for end in ("One", "Two")]
OVERRIDES = {"runtime.kind": "ray", "runtime.max_retries": 3}
HAS_NIXL = find_spec("nixl") is not None


@pytest.fixture(scope="module")
def texts() -> list[OmniOutput]:
    with Omni("two_step") as omni:
        return omni.generate(PROMPTS)


@pytest.fixture(scope="module")
def direct(ray_cluster: SessionCluster) -> Iterator[Omni]:
    """A pipeline with stages on two nodes."""
    register_files()
    overrides = OVERRIDES | {"runtime.tensor_transport": FILES}
    _, first, second = ray_cluster.nodes
    overrides |= {
        f"stages.{name}.placement.node": node
        for name, node in (("writer", first), ("reader", second))
    }
    with Omni(PipelineConfig.load("two_step", overrides)) as omni:
        yield omni
    remove_files()


def test_rows_are_fetched_from_the_actor_that_made_them(
    direct: Omni, texts: list[OmniOutput]
) -> None:
    before = num_fetched()
    assert_same(direct.generate(PROMPTS), texts)
    assert num_fetched() == before + len(PROMPTS)
    assert_same(direct.generate(PROMPTS), texts)
    assert direct.stats()["writer"].cached_tokens > 0


def test_cached_equals_uncached_there(direct: Omni) -> None:
    report = verify(direct, PROMPTS)
    assert report.equal, report


def test_what_was_fetched_is_let_go(direct: Omni) -> None:
    direct.generate(PROMPTS)
    wait_for(lambda: num_offered() == 0)


@pytest.mark.parametrize("victim", ["reader", "writer"])
def test_an_actor_that_dies(direct: Omni, texts: list[OmniOutput], victim: str) -> None:
    """A reader's rows are fetched again. A writer's may be lost with it, which is reported."""
    last: dict[str, OmniOutput] = {}
    has_killed = False
    for output in direct.stream([OmniRequest(prompt, prompt[-3:]) for prompt in PROMPTS]):
        if not has_killed and victim in output.stages:
            wait_for(lambda: pids_of(direct, victim))
            kill_workers(direct, victim)
            has_killed = True
        if output.finished:
            last[output.request_id] = output
    assert has_killed
    ended = [last[prompt[-3:]] for prompt in PROMPTS]
    for found, expected in zip(ended, texts, strict=True):
        if victim == "writer" and found.error is not None:
            assert "an object of the Ray cluster is lost" in found.error
        else:
            assert_same([found], [expected])
    assert_same(direct.generate(PROMPTS), texts)


@pytest.mark.parametrize(
    ("transport", "message"),
    [
        ("carrier_pigeon", "Ray has no tensor transport 'carrier_pigeon'; give object_store, nixl"),
        ("gloo", "'gloo' works within a group that is made once"),
        ("cuda_ipc", "'cuda_ipc' carries tensors of GPUs alone, and no stage has one"),
    ],
)
def test_transports_by_which_stages_cannot_hand_on(transport: str, message: str) -> None:
    overrides = OVERRIDES | {"runtime.tensor_transport": transport}
    with pytest.raises(ValueError, match=rf"^runtime\.tensor_transport: {message}"):
        Omni(PipelineConfig.load("two_step", overrides))


@pytest.mark.skipif(HAS_NIXL, reason="nixl is installed")
def test_a_transport_that_is_not_installed_is_one_error(ray_cluster: SessionCluster) -> None:
    overrides = OVERRIDES | {"runtime.tensor_transport": "nixl"}
    message = r"^stage 'writer': runtime\.tensor_transport: 'nixl' cannot be used in the actor's"
    with pytest.raises(ValueError, match=message):
        Omni(PipelineConfig.load("two_step", overrides))


@pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed")
def test_nixl_on_cpus(ray_cluster: SessionCluster, texts: list[OmniOutput]) -> None:
    overrides = OVERRIDES | {"runtime.tensor_transport": "nixl"}
    with Omni(PipelineConfig.load("two_step", overrides)) as omni:
        assert_same(omni.generate(PROMPTS), texts)
        report = verify(omni, PROMPTS)
        assert report.equal, report
