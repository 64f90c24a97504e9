"""The same pipelines in the actors of a Ray cluster: the same outputs, whatever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from omni import Omni, OmniOutput, OmniRequest, verify
from omni.pipelines.pipeline_config import PipelineConfig
from stages.remote.remote_stage import RemoteStage
from tests.support.ray_cluster import SessionCluster
from tests.support.same_outputs import assert_same, streamed

PROMPTS = ["A quick brown fox", "A quick brown dog", "A quick brown fox jumps", "Hello"]
SPOKEN = ["hello there", "what is it"]


@pytest.fixture(scope="module")
def texts() -> list[OmniOutput]:
    with Omni("two_step") as omni:
        return omni.generate(PROMPTS)


@pytest.fixture(scope="module")
def speeches() -> list[OmniOutput]:
    with Omni("omni_speech") as omni:
        return omni.generate(SPOKEN)


@pytest.fixture(scope="module")
def reading(ray_cluster: SessionCluster) -> Iterator[Omni]:
    with Omni("two_step", runtime="ray") as omni:
        yield omni


@pytest.fixture(scope="module")
def speaking(ray_cluster: SessionCluster) -> Iterator[Omni]:
    overrides = {"runtime.kind": "ray", "runtime.max_retries": 3, "runtime.stall_timeout_s": 3.0}
    with Omni(PipelineConfig.load("omni_speech", overrides)) as omni:
        yield omni


def pids_of(omni: Omni, name: str) -> list[int]:
    stage = omni.pipeline.stages[name]
    assert isinstance(stage, RemoteStage)
    return [pid for worker in stage.workers if (pid := worker.pid) is not None]


def test_text_is_that_of_one_process_and_prefixes_hit(
    reading: Omni, texts: list[OmniOutput]
) -> None:
    assert_same(reading.generate(PROMPTS), texts)
    assert_same(reading.generate(PROMPTS), texts)
    assert reading.stats()["reader"].cached_tokens > 0
    with reading.paused() as pipeline:
        for stage in pipeline.stages.values():
            stage.check_integrity()


def test_cached_equals_uncached_there(reading: Omni) -> None:
    report = verify(reading, PROMPTS)
    assert report.equal, report


def test_an_abort_ends_one_request_alone(reading: Omni, texts: list[OmniOutput]) -> None:
    request = OmniRequest("Hello", "long", sampling={"writer": {"max_tokens": 200}})
    for output in reading.stream(request):
        if not output.finished:
            reading.abort("long")
    assert output.error == "aborted"
    assert_same(reading.generate(PROMPTS), texts)


def test_streamed_speech_is_that_of_one_process(speaking: Omni, speeches: list[OmniOutput]) -> None:
    assert_same(streamed(speaking, SPOKEN), speeches)


@pytest.mark.parametrize(
    ("victim", "after", "how"),
    [
        ("talker", 3, signal.SIGSTOP),
        ("code2wav", 3, signal.SIGKILL),
    ],
)
def test_an_actor_that_dies_is_missed_by_nobody(
    speaking: Omni, speeches: list[OmniOutput], victim: str, after: int, how: signal.Signals
) -> None:
    (before,) = pids_of(speaking, victim)
    last: dict[str, OmniOutput] = {}
    for number, output in enumerate(speaking.stream([OmniRequest(t, t) for t in SPOKEN])):
        if number == after:
            os.kill(before, how)
        if output.finished:
            last[output.request_id] = output
    assert_same([last[text] for text in SPOKEN], speeches)
    assert_same(speaking.generate(SPOKEN), speeches)
    assert pids_of(speaking, victim) != [before]
    with speaking.paused() as pipeline:
        for stage in pipeline.stages.values():
            stage.check_integrity()


def test_a_stage_that_cannot_be_built_is_one_error(ray_cluster: SessionCluster) -> None:
    overrides = {"stages.reader.engine.max_model_len": 10**6}
    config = PipelineConfig.load("two_step", overrides)
    with pytest.raises(ValueError, match=r"^stage 'reader': .*max_model_len"):
        Omni(config, runtime="ray")


@pytest.mark.parametrize(
    ("placement", "told"),
    [
        (
            {"num_gpus": 64},
            "placement: each worker needs 1 CPU, 64 GPU, and no node of the Ray cluster has",
        ),
        (
            {"resources": {"unheard_of": 1}},
            "placement: each worker needs 1 CPU, 1 unheard_of, and no node",
        ),
        ({"node": "10.9.8.7"}, r"placement.node: the Ray cluster has no node '10\.9\.8\.7'"),
    ],
)
def test_what_the_cluster_does_not_have(
    ray_cluster: SessionCluster, placement: dict[str, object], told: str
) -> None:
    overrides = {f"stages.writer.placement.{key}": value for key, value in placement.items()}
    config = PipelineConfig.load("two_step", overrides | {"runtime.kind": "ray"})
    with pytest.raises(ValueError, match=rf"^stage 'writer': {told}"):
        Omni(config)
