"""What a runtime needs is looked for before anything is started."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Any

import pytest

from omni.pipelines import runtime_checks
from omni.pipelines.pipeline_config import PipelineConfig
from omni.pipelines.runtime_checks import check_devices, check_runtime
from stages.placement import Placement

ON_RAY = {"runtime.kind": "ray"}


def unused_port() -> int:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("placement", "count", "told"),
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
    placement: dict[str, Any], count: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_checks, "cuda_devices", lambda: count)
    with pytest.raises(ValueError, match="stage 'talker': placement") as caught:
        check_devices({"thinker": Placement(), "talker": Placement(**placement)})
    assert told in str(caught.value)


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
    monkeypatch.setattr(runtime_checks, "cuda_devices", lambda: 2)
    check_devices({"talker": Placement(**placement)})


def test_nobody_waits_for_torch_where_no_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_checks, "cuda_devices", lambda: pytest.fail("it was asked"))
    check_runtime(PipelineConfig.load("omni_speech", {"runtime.kind": "processes"}))


def test_ray_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_checks, "find_spec", lambda name: None)
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
