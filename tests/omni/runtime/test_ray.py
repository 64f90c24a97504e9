"""The same pipelines in the actors of a Ray cluster: the same outputs, whatever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from queue import Queue

import msgspec
import pytest
import ray

from engine.interface.log_fields import LogFields
from omni import Omni, OmniOutput, OmniRequest, verify
from omni.pipelines.pipeline_config import PipelineConfig
from stages.cluster.actor import PROTOCOL_VERSION, ActorConnection, Bundle, Hello
from stages.cluster.cluster_address import check_is_ray
from stages.cluster.object_bytes import HeldObjects
from stages.remote.codec import INLINE_BYTES
from stages.remote.remote_stage import RemoteStage
from tests.support.fake_speech_kind import fake_speech
from tests.support.patience import PATIENCE_S, wait_for
from tests.support.ray_cluster import SessionCluster
from tests.support.remote_stages import pids_of
from tests.support.same_outputs import assert_same, streamed
from tests.support.settled_stages import check_integrity
from tests.support.speech_pipeline import PROMPTS as SAID
from tests.support.speech_pipeline import text_and_sound, whole

PROMPTS = ["A quick brown fox", "A quick brown dog", "A quick brown fox jumps", "Hello"]
ROWS = {"stages.writer.final_output": ["text", "tensors"]}
Spoken = list[tuple[str | None, list[float]]]


@pytest.fixture(scope="module")
def speeches() -> Spoken:
    return list(map(text_and_sound, whole().values()))


@pytest.fixture(scope="module")
def texts() -> list[OmniOutput]:
    with Omni("two_step", overrides=ROWS) as omni:
        return omni.generate(PROMPTS)


@pytest.fixture(scope="module")
def reading(ray_cluster: SessionCluster) -> Iterator[Omni]:
    """Two language models, the first one twice on one node, and the other on another one."""
    _, writers, reader = ray_cluster.nodes
    overrides = ROWS | {
        "runtime.kind": "ray",
        "stages.writer.placement": {"replicas": 2, "node": writers},
        "stages.reader.placement.node": reader,
    }
    with Omni(PipelineConfig.load("two_step", overrides)) as omni:
        yield omni


@pytest.fixture(scope="module")
def speaking(ray_cluster: SessionCluster) -> Iterator[Omni]:
    """Three stages that stream, a node each, without models: test_omni_promises has those."""
    runtime = {"kind": "ray", "max_retries": 3, "stall_timeout_s": 3.0}
    first, second, third = ({"placement": {"node": node}} for node in ray_cluster.nodes)
    slow: dict[str, object] = {"pause_s": 0.02}
    logs: dict[str, object] = {"logs": "has a request"}
    config = fake_speech(runtime, thinker=logs | first, talker=slow | second, code2wav=slow | third)
    with Omni(config) as omni:
        yield omni


def test_text_is_that_of_one_process_and_prefixes_hit(
    reading: Omni, texts: list[OmniOutput]
) -> None:
    assert_same(reading.generate(PROMPTS), texts)
    assert_same(reading.generate(PROMPTS), texts)
    assert reading.stats()["reader"].cached_tokens > 0
    check_integrity(reading)


def test_replicas_share_the_requests_and_keep_their_prefixes(
    reading: Omni, texts: list[OmniOutput]
) -> None:
    stage = reading.pipeline.stages["writer"]
    assert isinstance(stage, RemoteStage)
    assert len(set(pids_of(reading, "writer"))) == 2
    before = stage.replica_stats()
    # Too many with one beginning for one of the two, each with another end.
    shared = [f"{'The same old story again, ' * 3}part {number}" for number in range(12)]
    first, again = reading.generate(shared), reading.generate(shared)
    spent = [after.since(was) for after, was in zip(stage.replica_stats(), before, strict=True)]
    assert all(each.num_steps and each.cached_tokens for each in spent)
    assert_same(again, first)
    reading.pipeline.stages["writer"].reset_prefix_cache()
    assert_same(reading.generate(PROMPTS), texts)


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


def test_objects_are_freed_when_all_have_read_them(
    reading: Omni, ray_cluster: SessionCluster
) -> None:
    wait_for(lambda: not ray_cluster.store_bytes)
    outputs = reading.generate(["say it again " * 100, "say it now " * 100])
    rows = [output.stages["writer"].tensors["hidden_states"].nbytes for output in outputs]
    assert min(rows) > INLINE_BYTES, "it is no object of its own"
    del outputs
    wait_for(lambda: not ray_cluster.store_bytes)


def test_streamed_speech_is_that_of_one_process(speaking: Omni, speeches: Spoken) -> None:
    assert spoken(speaking) == speeches


def spoken(omni: Omni, at_first_sound: Callable[[], object] = lambda: None) -> Spoken:
    return list(map(text_and_sound, streamed(omni, [*SAID.values()], at_first_sound)))


@pytest.mark.parametrize(
    ("victim", "how"), [("talker", signal.SIGSTOP), ("code2wav", signal.SIGKILL)]
)
def test_the_death_of_an_actor_changes_no_output(
    speaking: Omni, speeches: Spoken, victim: str, how: signal.Signals
) -> None:
    (before,) = pids_of(speaking, victim)
    assert spoken(speaking, lambda: os.kill(before, how)) == speeches
    assert spoken(speaking) == speeches
    assert pids_of(speaking, victim) != [before]
    check_integrity(speaking)


def test_a_stage_that_cannot_be_built_is_one_error_and_ends_the_others(
    ray_cluster: SessionCluster,
) -> None:
    before = ray_cluster.num_actors(os.getpid())
    wrong = {"tail": -1, "final_output": "text"}
    with pytest.raises(ValueError, match=r"^stage 'talker': tail must not be negative, got -1$"):
        Omni(fake_speech({"kind": "ray"}, ("thinker", "talker"), talker=wrong))
    wait_for(lambda: ray_cluster.num_actors(os.getpid()) == before)


def test_without_its_token_a_cluster_is_not_joined(ray_cluster: SessionCluster) -> None:
    with pytest.raises(ValueError, match=r"could not be joined: see RAY_AUTH_MODE and RAY_AUTH_TO"):
        check_is_ray(ray_cluster.address)


def test_log_records_of_actors_name_their_source(
    speaking: Omni, caplog: pytest.LogCaptureFixture
) -> None:
    speaking.generate(OmniRequest("hm", "asked"))
    (record,) = (each for each in caplog.records if each.getMessage() == "has a request")
    assert record.name == "omni.tests.fake_speech"
    about = LogFields(*(getattr(record, name) for name in LogFields.__slots__))
    assert about == LogFields("thinker", 0, "asked")


def test_an_actor_of_another_release_is_refused_in_a_sentence(ray_cluster: SessionCluster) -> None:
    """Its messages might have another meaning."""
    hello = msgspec.msgpack.encode(Bundle(hello=Hello(PROTOCOL_VERSION + 1, 1, "elsewhere")))

    class Newer:
        @ray.method(num_returns="streaming")
        def say(self, number: int) -> Iterator[bytes]:
            yield hello

    ended: Queue[str] = Queue()
    actor = ray.remote(num_cpus=0)(Newer).remote()
    connection = ActorConnection(actor, HeldObjects(), "writer/0", pytest.fail, ended.put)
    assert ended.get(timeout=PATIENCE_S) == (
        f"speaks version {PROTOCOL_VERSION + 1} of the protocol, and this process version "
        f"{PROTOCOL_VERSION}: all nodes must have the same release of omni-pipeline installed"
    )
    connection.close(0.0)


@pytest.mark.parametrize(
    ("placement", "message"),
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
    ray_cluster: SessionCluster, placement: dict[str, object], message: str
) -> None:
    overrides = {f"stages.writer.placement.{key}": value for key, value in placement.items()}
    with pytest.raises(ValueError, match=rf"^stage 'writer': {message}"):
        Omni("two_step", runtime="ray", overrides=overrides)
