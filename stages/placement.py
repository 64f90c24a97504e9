"""Where a stage runs: in which workers, with how many threads, on which devices."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine.interface.placed_error import PlacedError
from engine.interface.settings import Settings

RuntimeKind: TypeAlias = Literal["inline", "processes", "ray"]
"""Where the stages of a pipeline run: in this process by turns, in processes of their own on this
machine, or in the actors of a Ray cluster."""

_OF_RAY = {"CPU": "num_cpus", "GPU": "num_gpus"}
_MOST_WORKERS = 256
"""Of one stage. A pipeline's file may be untrusted."""


def _check_device(value: str) -> str:
    if not re.fullmatch(r"[a-z]{1,16}(:[0-9]{1,3})?", value):
        raise ValueError(f"must be a device such as cpu, cuda or cuda:1, got {value[:80]!r}")
    return value


_Device = Annotated[str, AfterValidator(_check_device)]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_OF_A_CLUSTER = ("num_cpus", "num_gpus", "resources", "node")
"""Keys that only a Ray cluster has."""


class Placement(Settings):
    """Where one stage runs. What is left out is decided by the runtime, and shown by ``omni
    explain``.

    Attributes:
        worker: a name; stages with the same one share a worker, where they take turns. None gives
            the stage workers of its own.
        replicas: workers that run the stage side by side; each has the model, and a cache of its
            own. As many as ``devices`` if only these are given.
        threads: CPU threads of each worker, or inline of the stage's steps; None shares the
            machine's cores out among the pipeline's workers, and inline takes as many as PyTorch
            does (all cores, or ``OMP_NUM_THREADS``).
        device: of each worker, such as ``cpu``, ``cuda`` or ``cuda:1``, in the place of the
            engine's own; with several replicas, ``cuda`` gives each a device to itself.
        devices: one for each replica, in the place of ``device``.
        num_cpus: CPUs that Ray reserves for each worker; None reserves as many as its threads.
        num_gpus: GPUs, or a fraction of one, that Ray reserves for each worker; None reserves one
            where ``device`` is ``cuda``.
        resources: of a Ray cluster, what else each worker needs: amounts by name.
        node: of a Ray cluster, the one that the workers have to be on: its address, or its id.
    """

    worker: str | None = Field(default=None, min_length=1, max_length=64)
    replicas: int = Field(default=1, ge=1, le=_MOST_WORKERS)
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
    def _as_many_replicas_as_tuple(cls, data: Any) -> Any:
        if isinstance(data, dict) and "replicas" not in data:
            devices = _as_tuple(data.get("devices"))
            if isinstance(devices, tuple) and devices:
                return {**data, "replicas": len(devices)}
        return data

    @model_validator(mode="after")
    def _values_go_together(self) -> Self:
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
            if name in _OF_RAY:
                raise PlacedError(("resources", name), f"is asked for by {_OF_RAY[name]}")
        if self.num_gpus is not None and self.num_gpus > 1 and not self.num_gpus.is_integer():
            raise PlacedError(
                ("num_gpus",), f"above 1 it must be a whole number, got {self.num_gpus:g}"
            )
        return self

    @property
    def all_devices(self) -> tuple[str | None, ...]:
        """Of each replica, on a machine whose devices it sees; None leaves it to the engine."""
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
        """CPU threads of each worker on a Ray cluster: the CPUs that it reserves, one at least."""
        return self.threads or max(1, int(self.reserved_cpus))

    @property
    def reserved_gpus(self) -> float:
        """GPUs that Ray reserves for each worker."""
        return float(self.device == "cuda") if self.num_gpus is None else self.num_gpus

    def misplaced(self, kind: RuntimeKind) -> tuple[str, str] | None:
        """The key of what a kind of runtime does not have, and what is wrong there, if anything."""
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
        asked = self.model_dump(include=set(_OF_A_CLUSTER), exclude_defaults=True)
        if kind != "ray" and asked:
            key = next(iter(asked))
            return key, (
                f"{asked[key]!r} is for a Ray cluster; it needs runtime: {{kind: ray}} "
                f"(or --runtime ray), not {kind!r}, or leave it out"
            )
        if kind != "ray":
            return None
        # A Ray worker would see a device that is named under another name.
        fix = "on a Ray cluster a worker sees only the GPUs that are reserved for it"
        if self.devices is not None:
            return "devices", f"{fix}: give device: cuda, and num_gpus"
        if self.device is not None and ":" in self.device:
            name = self.device.partition(":")[0]
            return "device", f"{self.device!r}: {fix}: give device: {name}, and num_gpus"
        return None

    @staticmethod
    def not_of(kind: RuntimeKind) -> tuple[str, ...]:
        """The keys that a runtime does not have."""
        of_workers = ("worker", "replicas", "devices")
        return {
            "inline": of_workers + _OF_A_CLUSTER,
            "processes": _OF_A_CLUSTER,
            "ray": ("worker",),
        }[kind]
