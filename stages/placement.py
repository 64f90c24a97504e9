"""Placement of a stage: its workers, threads and devices."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine.interface.placed_error import PlacedError
from engine.interface.settings import Settings

RuntimeKind: TypeAlias = Literal["inline", "processes", "ray"]
"""Kind of runtime: stages take turns in this process, run in separate processes on this machine, or
in the actors of a Ray cluster."""

_RAY_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}
_MAX_WORKERS = 256
"""Limit per stage, as a pipeline's file may be untrusted."""


def _check_device(value: str) -> str:
    if not re.fullmatch(r"[a-z]{1,16}(:[0-9]{1,3})?", value):
        raise ValueError(f"must be a device such as cpu, cuda or cuda:1, got {value[:80]!r}")
    return value


_Device = Annotated[str, AfterValidator(_check_device)]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_RAY_KEYS = ("num_cpus", "num_gpus", "resources", "node")
"""Keys that only Ray supports."""


class Placement(Settings):
    """Placement of one stage. The runtime chooses omitted values; ``omni explain`` shows them.

    Attributes:
        worker: name of a worker; stages with the same name share it and take turns. None: the
            stage has separate workers.
        replicas: number of workers that run the stage in parallel, each with the model and a
            separate cache. Defaults to the number of ``devices`` if only these are given.
        threads: CPU threads of each worker, or inline of the stage's steps. None divides the
            machine's cores among the pipeline's workers; inline uses PyTorch's default (all cores,
            or ``OMP_NUM_THREADS``).
        device: device of each worker, such as ``cpu``, ``cuda`` or ``cuda:1``; replaces the
            engine's device. With several replicas, ``cuda`` gives each a separate device.
        devices: a device per replica, instead of ``device``.
        num_cpus: CPUs that Ray reserves for each worker; None reserves as many as its threads.
        num_gpus: GPUs, or a fraction of one, that Ray reserves for each worker; None reserves one
            if ``device`` is ``cuda``.
        resources: other resources of a Ray cluster that each worker needs: amounts by name.
        node: address or id of the node of a Ray cluster that the workers must run on.
    """

    worker: str | None = Field(default=None, min_length=1, max_length=64)
    replicas: int = Field(default=1, ge=1, le=_MAX_WORKERS)
    threads: int | None = Field(default=None, ge=1, le=1024)
    device: _Device | None = None
    devices: Annotated[
        Annotated[tuple[_Device, ...], Field(min_length=1)] | None, BeforeValidator(_as_tuple)
    ] = None
    num_cpus: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    num_gpus: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    resources: dict[
        Annotated[str, Field(min_length=1)], Annotated[float, Field(gt=0, allow_inf_nan=False)]
    ] = Field(default_factory=dict)
    node: str | None = Field(default=None, min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _default_replicas(cls, data: Any) -> Any:
        if isinstance(data, dict) and "replicas" not in data:
            devices = _as_tuple(data.get("devices"))
            if isinstance(devices, tuple) and devices:
                return {**data, "replicas": len(devices)}
        return data

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.devices is not None and self.device is not None:
            raise PlacedError(
                ("devices",), "there is a device, too; give the one or the others, not both"
            )
        if self.devices is not None and len(self.devices) != self.replicas:
            raise PlacedError(
                ("devices",),
                f"must be one for each of {self.replicas} replicas, got {len(self.devices)}; one "
                "device may be named several times",
            )
        if self.worker is not None and self.replicas > 1:
            raise PlacedError(
                ("worker",),
                f"stages that share a worker have one replica each, and this one {self.replicas}; "
                "leave out one of the two",
            )
        for name in self.resources:
            if name in _RAY_OPTIONS:
                raise PlacedError(("resources", name), f"is asked for by {_RAY_OPTIONS[name]}")
        if self.num_gpus is not None and self.num_gpus > 1 and not self.num_gpus.is_integer():
            raise PlacedError(
                ("num_gpus",), f"above 1 it must be a whole number, got {self.num_gpus:g}"
            )
        return self

    @property
    def all_devices(self) -> tuple[str | None, ...]:
        """Device of each replica, if it sees all devices of the machine; None: engine's choice."""
        if self.devices is not None:
            return self.devices
        if self.device == "cuda" and self.replicas > 1:
            return tuple(f"cuda:{index}" for index in range(self.replicas))
        return (self.device,) * self.replicas

    @property
    def reserved_cpus(self) -> float:
        """CPUs that Ray reserves for each worker."""
        return float(self.threads or 1) if self.num_cpus is None else self.num_cpus

    @property
    def actor_threads(self) -> int:
        """CPU threads of each worker on a Ray cluster: its reserved CPUs, but at least one."""
        return self.threads or max(1, int(self.reserved_cpus))

    @property
    def reserved_gpus(self) -> float:
        """GPUs that Ray reserves for each worker."""
        return float(self.device == "cuda") if self.num_gpus is None else self.num_gpus

    def misplaced(self, kind: RuntimeKind) -> tuple[str, str] | None:
        """Return a key that a kind of runtime does not support, and the problem, if any."""
        if kind == "inline" and self.replicas > 1:
            return "replicas", (
                f"{self.replicas} is for workers, and with runtime.kind: inline all stages share "
                "one worker; it needs runtime: {kind: processes} (or --runtime processes), or "
                "leave it out"
            )
        if kind != "processes" and self.worker is not None:
            return "worker", (
                f"{self.worker!r} is for processes that stages share; it needs runtime: {{kind: "
                f"processes}} (or --runtime processes), not {kind!r}, or leave it out"
            )
        given = self.model_dump(include=set(_RAY_KEYS), exclude_defaults=True)
        if kind != "ray" and given:
            key = next(iter(given))
            return key, (
                f"{given[key]!r} is for a Ray cluster; it needs runtime: {{kind: ray}} "
                f"(or --runtime ray), not {kind!r}, or leave it out"
            )
        if kind != "ray":
            return None
        # In a Ray worker, a named device would have another name.
        fix = "on a Ray cluster a worker sees only the GPUs that are reserved for it"
        if self.devices is not None:
            return "devices", f"{fix}: give device: cuda, and num_gpus"
        if self.device is not None and ":" in self.device:
            name = self.device.partition(":")[0]
            return "device", f"{self.device!r}: {fix}: give device: {name}, and num_gpus"
        return None

    @staticmethod
    def not_of(kind: RuntimeKind) -> tuple[str, ...]:
        """Return the keys that a kind of runtime does not support."""
        of_workers = ("worker", "replicas", "devices")
        return {
            "inline": of_workers + _RAY_KEYS,
            "processes": _RAY_KEYS,
            "ray": ("worker",),
        }[kind]
