"""Where stages run, as the command line takes, checks and draws it."""

from __future__ import annotations

import yaml

from omni.commands.explanation import draw_placement
from omni.commands.options import RuntimeFlags
from omni.pipelines.pipeline_config import PipelineConfig
from tests.support.command_line import omni


def explained(*words: str) -> str:
    result = omni("explain", "omni_speech", "--no-load", *words, COLUMNS="200")
    assert result.exit_code == 0, result.output
    return result.stdout


def settings(told: str) -> dict[str, object]:
    read: dict[str, object] = yaml.safe_load(told.split("Every setting:")[1])
    return read


def test_a_flag_is_the_same_as_its_place() -> None:
    by_flag = explained("--runtime", "ray", "--address", "head:6379")
    by_place = explained("--set", "runtime.kind=ray", "--set", "runtime.address=head:6379")
    assert by_flag == by_place
    assert settings(by_flag)["runtime"] == {
        "kind": "ray",
        "address": "head:6379",
        "tensor_transport": "object_store",
        "max_retries": 1,
        "stall_timeout_s": 120.0,
    }
    assert RuntimeFlags().runtime_overrides == {}


def test_every_default_of_a_placement_is_shown() -> None:
    stages = settings(explained())["stages"]
    assert isinstance(stages, dict)
    assert stages["talker"]["placement"] == {
        "worker": None,
        "replicas": 1,
        "threads": 1,
        "device": None,
        "devices": None,
        "num_cpus": None,
        "num_gpus": None,
        "resources": {},
        "node": None,
    }


def test_an_unknown_runtime_is_told_by_its_flag() -> None:
    for command in ("validate", "explain", "run", "verify", "serve"):
        result = omni(command, "two_step", "--runtime", "process", COLUMNS="200")
        assert result.exit_code == 2
        assert result.stderr == (
            "error: --runtime: runtime.kind: unknown runtime 'process'; did you mean 'processes'?\n"
        )


def test_an_address_is_for_a_cluster() -> None:
    result = omni(
        "validate", "two_step", "--runtime", "processes", "--address", "head:1", COLUMNS="200"
    )
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --address: runtime.address: 'head:1' is that of a Ray ")


def test_a_flag_goes_before_a_place() -> None:
    told = explained("--runtime", "processes", "--set", "runtime.kind=inline")
    assert "Where the stages run (processes" in told


def drawn(cores: int = 4, **overrides: object) -> str:
    return draw_placement(PipelineConfig.load("omni_speech", overrides), cores)


def test_each_stage_has_a_box_with_its_workers_and_what_comes_in() -> None:
    overrides = {
        "runtime.kind": "processes",
        "stages.thinker.placement.threads": None,
        "stages.talker.placement.replicas": 2,
    }
    assert drawn(cores=5, **overrides).startswith(
        """\
Where the stages run (processes, 5 cores):

  ┌ this process ──────────────────────────────────────────────────────────┐
  │ takes requests, and hands on handles: what stages compute goes past it │
  └────────────────────────────────────────────────────────────────────────┘
  ┌ thinker ───────────────────────────┐
  │ 1 process of 2 threads, device cpu │
  │ ◄── prompt                         │
  └────────────────────────────────────┘
  ┌ talker ────────────────────────────────────────────────────────────────────┐
  │ 2 processes of 1 thread, device cpu                                        │
  │ ◄~~ thinker: a handle of shared memory, every 4 tokens; 2 of them may wait │
  └────────────────────────────────────────────────────────────────────────────┘
  ┌ code2wav ─"""
    )


def test_inline_all_stages_share_one_box() -> None:
    told = drawn()
    assert told.count("┌") == 1
    assert "thinker, 1 thread, device cpu" in told
    assert "thinker, device cpu" in drawn(**{"stages.thinker.placement.threads": None})
    assert "◄~~ talker: its output, every 8 tokens; 2 of them may wait" in told
    assert "Where the stages run (inline, 1 core):" in drawn(cores=1)


def test_on_a_cluster_it_is_told_what_is_reserved() -> None:
    told = drawn(
        **{
            "runtime.kind": "ray",
            "runtime.address": "head:6379",
            "stages.thinker.placement": {"device": "cuda", "threads": 3},
            "stages.talker.placement": {
                "replicas": 2,
                "num_cpus": 0.5,
                "resources": {"disk": 1},
                "node": "10.0.0.7",
            },
        }
    )
    assert "┌ Ray cluster: head:6379 ─" in told
    assert "│ 1 actor that reserves 3 CPU, 1 GPU, device cuda " in told
    assert "│ 2 actors that reserve 0.5 CPU, 0 GPU, 1 disk, on node 10.0.0.7, device cpu " in told
    assert "◄~~ talker: a reference into the object store, every 8 tokens; 2 of them" in told


def test_devices_of_replicas_are_listed() -> None:
    told = drawn(
        **{"runtime.kind": "processes", "stages.talker.placement.devices": ["cpu", "cuda:1"]}
    )
    assert "2 processes of 1 thread, cpu, cuda:1" in told


def test_the_boxes_are_closed() -> None:
    for kind in ("inline", "processes", "ray"):
        lines = drawn(**{"runtime.kind": kind}).splitlines()[2:]
        open_widths: list[int] = []
        for line in (line.strip() for line in lines):
            inner = line.strip("│ ")
            if inner.startswith("┌"):
                open_widths.append(len(inner))
            elif inner.startswith("└"):
                assert len(inner) == open_widths.pop()
        assert open_widths == []


def test_stages_that_share_a_worker_share_a_box() -> None:
    shared = {f"stages.{name}.placement.worker": "voice" for name in ("talker", "code2wav")}
    overrides = {"runtime.kind": "processes", "stages.talker.placement.threads": 2}
    assert drawn(**shared, **overrides).endswith(
        """\
  ┌ voice: one process, its stages by turns ─────────────────────────────────────┐
  │ talker, 2 threads, device cpu                                                │
  │   ◄~~ thinker: a handle of shared memory, every 4 tokens; 2 of them may wait │
  │ code2wav, 1 thread, device cpu                                               │
  │   ◄~~ talker: a handle of shared memory, every 8 tokens; 2 of them may wait  │
  └──────────────────────────────────────────────────────────────────────────────┘"""
    )
