"""Checks that a pipeline can run where it is to run, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from omni.pipelines.pipeline_config import PipelineConfig
from stages.cluster.cluster_address import find_cluster
from stages.placement import Placement
from stages.portable import check_portable


def check_runtime(config: PipelineConfig) -> None:
    """Check what can be known of a pipeline's runtime without starting any of it.

    Raises:
        ValueError: something will not do; says what, where, and what to do.
    """
    if config.runtime.kind != "inline":
        check_portable(config.stages)
    if config.runtime.kind == "ray":
        check_cluster(config.runtime.address)
    else:
        check_devices(config.placements)


def cuda_devices() -> int:
    """The number of CUDA devices that torch sees."""
    import torch  # only here: a pipeline that names none need not wait for it

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_devices(placements: Mapping[str, Placement]) -> None:
    """Check that the CUDA devices are there which placements name.

    Raises:
        ValueError: they are not, or are fewer than replicas are to have one each.
    """
    wanted = {
        name: [device for device in placement.all_devices if device and device.startswith("cuda")]
        for name, placement in placements.items()
    }
    if not any(wanted.values()):
        return
    count = cuda_devices()
    there = {0: "no CUDA device", 1: "one CUDA device, cuda:0"}.get(
        count, f"{count} CUDA devices, cuda:0 to cuda:{count - 1}"
    )
    for name, devices in wanted.items():
        missing = next(
            (each for each in devices if int(each.partition(":")[2] or 0) >= count), None
        )
        if missing is None:
            continue
        placement = placements[name]
        if placement.devices is None and placement.device == "cuda" and placement.replicas > 1:
            raise ValueError(
                f"stage {name!r}: placement: {placement.replicas} replicas on device 'cuda' take a "
                f"device each, but torch sees {there}; take fewer replicas, or name the devices "
                "that several share: devices: [cuda:0, cuda:0]"
            )
        key = "device" if placement.devices is None else "devices"
        raise ValueError(
            f"stage {name!r}: placement.{key}: {missing!r} was asked for, but torch sees {there}"
            + ("; take 'cpu', or leave it out" if count == 0 else "")
        )


def check_cluster(address: str | None) -> None:
    """Check that Ray is installed, and that a cluster answers where one should be.

    Raises:
        ValueError: Ray is not installed, or nothing answers there.
    """
    if find_spec("ray") is None:
        raise ValueError(
            "runtime.kind: 'ray' needs a package that is not installed: pip install -e '.[ray]' "
            "in a checkout of omni-pipeline"
        )
    find_cluster(address)
