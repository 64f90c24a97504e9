"""Stage placement: what a file may contain, its meaning, and the answer to each mistake."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from omni.pipelines import pipeline_config
from omni.pipelines.config_file import ConfigError, parse_overrides
from omni.pipelines.pipeline_config import PipelineConfig, check_devices, check_runtime
from omni.pipelines.runtime_config import RuntimeConfig, resolve_threads
from omni.requests.output_writer import RunRecord
from stages import Stage, StageConfig, register_stage_kind, stage_config
from stages.placement import Placement
from tests.support.fake_stage import FakeStage
from tests.support.tables import rows

STAGES = ("thinker", "talker", "code2wav")
IN_PROCESSES = {"runtime.kind": "processes"}
ON_RAY = {"runtime.kind": "ray"}


def speech(**overrides: Any) -> PipelineConfig:
    """Return the three stages of ``omni_speech``; ``thinker_threads`` is a key of a placement."""
    places = {}
    for key, value in overrides.items():
        stage, _, rest = key.partition("_")
        places[f"stages.{stage}.placement.{rest}" if stage in STAGES else key] = value
    return PipelineConfig.load("omni_speech", places)


def error_of(overrides: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        PipelineConfig.load("omni_speech", overrides, flag="--set")
    return str(caught.value)


def test_without_a_word_all_stages_run_in_this_process() -> None:
    config = PipelineConfig.load("omni_speech")
    assert config.runtime == RuntimeConfig()
    assert config.runtime.kind == "inline"
    # Tiny as they are, each is as fast on one thread.
    assert all(stage.placement == Placement(threads=1) for stage in config.stages.values())


def test_what_a_file_says_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\n"
        "runtime: {kind: ray, address: 'head:6379', max_retries: 2, stall_timeout_s: 30}\n"
        "stages:\n"
        "  writer:\n"
        "    kind: autoregressive\n"
        "    model: seeded:qwen2\n"
        "    placement: {replicas: 2, threads: 3, device: cuda, num_cpus: 1.5, num_gpus: 0.5,\n"
        "                resources: {highmem: 1}, node: 10.0.0.7}\n"
        "    final_output: text\n"
    )
    config = PipelineConfig.load(file)
    assert config.runtime == RuntimeConfig(
        kind="ray", address="head:6379", max_retries=2, stall_timeout_s=30.0
    )
    assert config.stages["writer"].placement == Placement(
        replicas=2,
        threads=3,
        device="cuda",
        num_cpus=1.5,
        num_gpus=0.5,
        resources={"highmem": 1.0},
        node="10.0.0.7",
    )


def test_a_flag_and_a_place_mean_the_same() -> None:
    own = PipelineConfig.load("omni_speech")
    assert own.with_runtime("processes") == PipelineConfig.load("omni_speech", IN_PROCESSES)
    assert own.with_runtime(None) == own
    assert own.with_runtime(RuntimeConfig(kind="ray", max_retries=0)).runtime.max_retries == 0


def test_a_kind_replaces_no_more_than_the_kind() -> None:
    own = RuntimeConfig(kind="inline", max_retries=3)
    assert RuntimeConfig.parse("processes", own) == RuntimeConfig(kind="processes", max_retries=3)
    assert RuntimeConfig.parse(None) == RuntimeConfig()
    with pytest.raises(ValueError, match="kind: unknown runtime 'proceses'; did you mean 'proc"):
        RuntimeConfig.parse("proceses")
    with pytest.raises(ValueError, match="runtime must be one of 'inline', 'processes', 'ray', a"):
        RuntimeConfig.parse(3)  # type: ignore[arg-type]


# Settings of the talker's placement, or of the runtime, and their errors.
MISTAKES = rows("""
runtime.kind=threads | runtime.kind: unknown runtime 'threads'; known are 'inline', 'processes', 'ra
runtime=processes | runtime: is a mapping: write runtime: {kind: processes}
processes & runtime.address=head:6379 | runtime.address: 'head:6379' is for a Ray cluster; it needs
ray & runtime.address=head | runtime.address: must be host:port or auto, got 'head'
ray & runtime.address=head:99999 | runtime.address: must be host:port or auto, got 'head:99999'
processes & runtime.tensor_transport=nixl | runtime.tensor_transport: 'nixl' is for a Ray cluster; i
.replicas=2 | .replicas: 2 is for workers, and with runtime.kind: inline all stages share one worker
.worker=v | .worker: 'v' is for processes that stages share; it needs runtime: {kind: processes} (or
ray & .worker=v | .worker: 'v' is for processes that stages share; it needs runtime: {kind: processe
processes & ={worker: v, replicas: 2} | .worker: stages that share a worker have one replica each, a
processes & .worker='' | .worker: must not be empty
.resources={disk: 1} | .resources: {'disk': 1.0} is for a Ray cluster; it needs runtime: {kind: ray}
processes & .num_gpus=1 | .num_gpus: 1.0 is for a Ray cluster
processes & .node=head | .node: 'head' is for a Ray cluster
processes & ={device: cpu, devices: [cpu]} | .devices: there is a device, too; give the one or the o
processes & ={replicas: 3, devices: [cpu, cpu]} | .devices: must be one for each of 3 replicas, got
processes & .devices=[] | .devices: must not be empty
processes & .devices=cpu | .devices: should be a list, got 'cpu'
.device=GPU 1 | .device: must be a device such as cpu, cuda or cuda:1
ray & .device=cuda:1 | .device: 'cuda:1': on a Ray cluster a worker sees only the GPUs that are rese
ray & .resources={GPU: 1} | .resources.GPU: is asked for by num_gpus
ray & .num_gpus=1.5 | .num_gpus: above 1 it must be a whole number, got 1.5
.replicas=0 | .replicas: should be greater than or equal to 1, got 0
.replicas=1000000 | .replicas: should be less than or equal to 256
.replicas='2' | .replicas: should be a valid integer, got '2'
.replica=2 | .replica: unknown key; did you mean 'replicas'?
runtime.stall_timeout_s=0 | runtime.stall_timeout_s: should be greater than 0, got 0
runtime.max_retries=-1 | runtime.max_retries: should be greater than or equal to 0, got -1
""")


@pytest.mark.parametrize(("changes", "reported"), MISTAKES)
def test_a_mistake_is_reported_with_its_location(changes: str, reported: str) -> None:
    place = "stages.talker.placement"
    *kind, change = changes.split(" & ")
    assignments = [f"runtime.kind={each}" for each in kind]
    assignments.append(place + change if change[0] in ".=" else change)
    message = error_of(parse_overrides(assignments))
    assert (place + reported if reported.startswith(".") else reported) in message
    assert "\n" not in message


PLACED: dict[str, Any] = {
    "name": "placed",
    "runtime": {"kind": "ray", "address": "head:6379", "max_retries": 3},
    "stages": {
        "writer": {
            "kind": "autoregressive",
            "model": "seeded:qwen2",
            "placement": {"replicas": 2, "threads": 1, "num_cpus": 1.5, "device": "cpu"},
            "final_output": "text",
        }
    },
}


def placed_file(folder: Path, **changes: Any) -> Path:
    """Write a pipeline's file that requests what only a Ray cluster has, or with changes."""
    file = folder / "placed.yaml"
    file.write_text(json.dumps(PLACED | changes))
    return file


@pytest.fixture(params=["a file", "an object"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., PipelineConfig]:
    """``load(kind, **changes)``: the pipeline of :func:`placed_file`, in a given runtime."""

    def of_a_file(kind: str, /, **changes: Any) -> PipelineConfig:
        return PipelineConfig.load(placed_file(tmp_path, **changes), {"runtime.kind": kind})

    def of_an_object(kind: str, /, **changes: Any) -> PipelineConfig:
        return PipelineConfig.load(placed_file(tmp_path, **changes)).with_runtime(kind)

    return of_a_file if request.param == "a file" else of_an_object


def test_settings_of_a_replaced_runtime_are_dropped_and_reported(
    load: Callable[..., PipelineConfig], caplog: pytest.LogCaptureFixture
) -> None:
    inline = load("inline")
    assert inline.runtime == RuntimeConfig(max_retries=3)
    assert inline.stages["writer"].placement == Placement(device="cpu", threads=1)
    assert caplog.messages == [
        f"{setting} is not for runtime inline; left out"
        for setting in (
            "runtime.address: head:6379",
            "stages.writer.placement.replicas: 2",
            "stages.writer.placement.num_cpus: 1.5",
        )
    ]
    caplog.clear()
    processes = load("processes")
    assert processes.stages["writer"].placement == Placement(replicas=2, threads=1, device="cpu")
    assert len(caplog.messages) == 2
    caplog.clear()
    assert load("ray").model_dump() == PipelineConfig.model_validate(PLACED).model_dump()
    assert caplog.messages == []


def test_a_file_that_names_no_runtime_runs_in_the_one_that_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = placed_file(tmp_path, runtime={})
    with pytest.raises(ConfigError, match="replicas: 2 is for workers"):
        PipelineConfig.load(file)
    assert caplog.messages == [], "one that is refused"
    given: list[dict[str, Any]]
    given = [{"runtime.kind": "inline"}, {"runtime": {"kind": "inline"}}, {"runtime": {}}]
    for overrides in given:
        inline = PipelineConfig.load(file, overrides)
        assert inline.stages["writer"].placement == Placement(device="cpu", threads=1)
        assert "writer.placement.replicas: 2 is not for runtime inline; left out" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("beside", "reported"),
    [
        ({"stages.writer.placement.replicas": 2}, "placement.replicas: 2 is for workers, and with"),
        ({"stages.writer.placement": {"replicas": 3}}, "placement.replicas: 3 is for workers, and"),
        ({"stages.writer.placement.node": "n"}, "placement.node: 'n' is for a Ray cluster; it nee"),
        ({"runtime.address": "head:1"}, "runtime.address: 'head:1' is for a Ray cluster; it needs"),
    ],
)
def test_what_is_asked_for_beside_a_runtime_that_does_not_have_it_is_an_error_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, beside: dict[str, Any], reported: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--set .*{reported}") as caught:
        PipelineConfig.load(
            placed_file(tmp_path), {"runtime.kind": "inline"} | beside, flag="--set"
        )
    assert "inline" in str(caught.value)
    assert caplog.messages == [], "of the file's own keys"


def test_the_only_device_of_a_stage_stays_its_own_everywhere(
    load: Callable[..., PipelineConfig], caplog: pytest.LogCaptureFixture
) -> None:
    writer = PLACED["stages"]["writer"] | {"placement": {"devices": ["cuda:1"]}}
    inline = load("inline", runtime={"kind": "processes"}, stages={"writer": writer})
    assert inline.stages["writer"].placement == Placement(devices=("cuda:1",))
    assert caplog.messages == []


def test_a_device_that_has_another_name_there_is_refused(
    load: Callable[..., PipelineConfig],
) -> None:
    """Left out, it would run on another kind of device than it requests."""
    writer = PLACED["stages"]["writer"] | {"placement": {"device": "cuda:1"}}
    changes = {"runtime": {"kind": "processes"}, "stages": {"writer": writer}}
    with pytest.raises(ValueError, match=r"placement\.device: 'cuda:1': on a Ray cluster a worker"):
        load("ray", **changes)


def test_a_kind_without_a_device_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_config, "_KINDS", dict(stage_config._KINDS))

    @register_stage_kind
    class HumStageConfig(StageConfig):
        kind: Literal["hum"]
        takes_chunks: ClassVar[bool] = False

        def build_stage(self, name: str) -> Stage:
            return FakeStage(name)

    with pytest.raises(ValueError, match="a stage of kind 'hum' has no device; leave it out"):
        HumStageConfig(kind="hum", placement=Placement(device="cpu"))
    assert HumStageConfig(kind="hum").on_device(None) == HumStageConfig(kind="hum")


def test_devices_are_as_many_as_replicas() -> None:
    assert Placement(devices=("cpu", "cuda:1")).replicas == 2
    assert Placement(devices=("cpu",)).all_devices == ("cpu",)
    assert Placement(replicas=2, device="cuda").all_devices == ("cuda:0", "cuda:1")
    assert Placement(replicas=2, device="cuda:1").all_devices == ("cuda:1", "cuda:1")
    assert Placement(replicas=2).all_devices == (None, None)


@pytest.mark.usefixtures("checkpoint_cache")
def test_each_replica_is_built_for_its_device() -> None:
    config = speech(**IN_PROCESSES, talker_devices=["cuda:1", "cuda:0"])
    devices = [config.resolved("talker", replica).engine.device for replica in range(2)]  # type: ignore[attr-defined]
    assert devices == ["cuda:1", "cuda:0"]
    on_ray = speech(**ON_RAY, talker_replicas=2, talker_device="cuda")
    assert on_ray.resolved("talker", 1).engine.device == "cuda", "a worker's own GPU"  # type: ignore[attr-defined]


VOICE = {"talker_worker": "voice", "code2wav_worker": "voice"}


@pytest.mark.parametrize(
    ("placements", "cores", "threads"),
    [
        ({}, 2, (1, 1, 1)),
        ({}, 3, (1, 1, 1)),
        ({}, 8, (3, 3, 2)),
        ({"talker_threads": 5}, 8, (2, 5, 1)),
        ({"talker_threads": 9}, 8, (1, 9, 1)),
        ({"talker_replicas": 2, "talker_threads": 2}, 8, (2, 2, 2)),
        ({"thinker_replicas": 2}, 5, (1, 2, 1)),
        ({"thinker_replicas": 2}, 6, (2, 1, 1)),
        ({"thinker_threads": 1, "talker_threads": 2, "code2wav_threads": 3}, 4, (1, 2, 3)),
        (VOICE, 8, (4, 4, 4)),
        (VOICE | {"talker_threads": 2}, 8, (4, 2, 4)),
        (VOICE | {"talker_threads": 3, "code2wav_threads": 2}, 8, (5, 3, 2)),
    ],
)
def test_cores_are_shared_out_among_all_workers(
    placements: dict[str, Any], cores: int, threads: tuple[int, ...]
) -> None:
    not_said: dict[str, Any] = {f"{name}_threads": None for name in STAGES}
    config = speech(**IN_PROCESSES, **(not_said | placements))
    assert tuple(resolve_threads(config.placements, cores).values()) == threads


def test_a_run_may_go_on_elsewhere() -> None:
    """The location of stages changes no output; the kind of device does, in the last bit."""

    def record(config: PipelineConfig) -> RunRecord:
        return RunRecord.of(config, "digest", 1)

    inline = record(PipelineConfig.load("omni_speech"))
    elsewhere = record(speech(**IN_PROCESSES, talker_replicas=2, thinker_threads=1))
    assert inline.differences(elsewhere) == ""
    on_cuda = record(speech(**IN_PROCESSES, talker_device="cuda"))
    assert "stages.talker.placement" in inline.differences(on_cuda)
    assert json.loads(on_cuda.model_dump_json())["pipeline"]["stages"]["talker"]["placement"]


def unused_port() -> int:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("placement", "count", "reported"),
    [
        (
            {"device": "cuda:3"},
            2,
            "'cuda:3' was asked for, but torch sees 2 CUDA devices, cuda:0 t",
        ),
        ({"device": "cuda:1"}, 1, "'cuda:1' was asked for, but torch sees one CUDA device, cuda:0"),
        ({"device": "cuda"}, 0, "placement.device: 'cuda' was asked for, but torch sees no CUDA"),
        ({"devices": ("cpu", "cuda:2")}, 2, "placement.devices: 'cuda:2' was asked for"),
        (
            {"device": "cuda", "replicas": 3},
            2,
            "3 replicas on device 'cuda' take a device each, but torch sees 2 CUDA devices",
        ),
    ],
)
def test_more_devices_than_there_are(
    placement: dict[str, Any], count: int, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_config, "cuda_devices", lambda: count)
    with pytest.raises(ValueError, match="stage 'talker': placement") as caught:
        check_devices({"thinker": Placement(), "talker": Placement(**placement)})
    assert reported in str(caught.value)


@pytest.mark.parametrize(
    "placement",
    [
        {},
        {"device": "cpu", "replicas": 9},
        {"device": "cuda", "replicas": 2},
        {"device": "cuda:1", "replicas": 4},
        {"devices": ("cuda:0", "cuda:0", "cuda:1")},
    ],
)
def test_devices_that_are_there(placement: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_config, "cuda_devices", lambda: 2)
    check_devices({"talker": Placement(**placement)})


def test_torch_is_not_imported_where_no_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_config, "cuda_devices", lambda: pytest.fail("it was asked"))
    check_runtime(PipelineConfig.load("omni_speech", {"runtime.kind": "processes"}))


def test_a_missing_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_config, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed: pip install -e '.\[ray\]'"):
        check_runtime(PipelineConfig.load("omni_speech", ON_RAY))


def test_a_cluster_that_does_not_answer() -> None:
    address = f"127.0.0.1:{unused_port()}"
    config = PipelineConfig.load("omni_speech", ON_RAY | {"runtime.address": address})
    with pytest.raises(ValueError, match="runtime.address: no Ray cluster answers at '") as caught:
        check_runtime(config)
    assert address in str(caught.value)
    assert "leave the address out to start one on this machine" in str(caught.value)


def test_a_kind_that_no_worker_finds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PipelineConfig.load("omni_speech", {"runtime.kind": "processes"})
    kind = type(config.stages["talker"])
    monkeypatch.setattr(kind, "__module__", "__main__")
    with pytest.raises(ValueError, match="kind 'autoregressive': 'Autoreg.*in the main script"):
        check_runtime(config)
    check_runtime(config.with_runtime("inline"))
