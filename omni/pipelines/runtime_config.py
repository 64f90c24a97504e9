"""Settings of where the stages of a pipeline run, and the threads of each of their workers.

If a runtime other than the file's is requested, settings that it lacks are dropped with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine.files.gguf_header import find_gguf, read_gguf_header
from engine.files.json_file import read_json_object
from engine.interface.arguments import check_argument
from engine.interface.log_fields import package_logger
from engine.interface.placed_error import PlacedError, suggest
from engine.interface.settings import Settings
from omni.seeded.checkpoints import SEEDED_MODELS, SEEDED_PREFIX
from stages.placement import Placement, RuntimeKind

_LOG = package_logger(__name__)
_KINDS = get_args(RuntimeKind)
_CLUSTER_KEYS = ("address", "tensor_transport")


def leave_behind(data: dict[str, Any], overrides: Mapping[str, Any]) -> list[str]:
    """Drop settings of a file that the runtime does not have, if an override selects another one.

    So the same file runs everywhere. Without such an override the file is unchanged, and settings
    that its own runtime does not have are refused. So are overrides that the runtime does not have:
    requesting replicas and the inline runtime together is a contradiction.

    Args:
        data: content of the file, before overrides; modified in place.
        overrides: values by dotted path, which replace the file's.

    Returns:
        Messages about dropped settings, for :func:`tell`, if there is no other error.
    """
    kind: Any = None
    for place, value in overrides.items():
        if place == "runtime.kind":
            kind = value
        elif place == "runtime" and isinstance(value, dict):
            kind = value.get("kind", "inline")
    if kind not in _KINDS:
        return []
    left = runtime_for(data.get("runtime"), kind)
    stages = data.get("stages")
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        if isinstance(stage, dict):
            left += _drop_from_placement(name, stage.get("placement"), kind)
    return left


def runtime_for(settings: Any, kind: str) -> list[str]:
    """Drop a runtime's settings that another kind does not have; return messages about them."""
    if kind == "ray" or kind not in _KINDS:
        return []
    return _drop(settings, _CLUSTER_KEYS, "runtime", kind)


def placement_for(name: str, placement: Placement, kind: RuntimeKind) -> Placement:
    """Return a stage's placement for another runtime; warn about dropped settings."""
    settings = placement.model_dump(exclude_defaults=True)
    left = _drop_from_placement(name, settings, kind)
    tell(left)
    return Placement(**settings) if left else placement


def tell(left: list[str]) -> None:
    """Log warnings about dropped settings."""
    for each in left:
        _LOG.warning("%s", each)


def _drop_from_placement(name: str, settings: Any, kind: RuntimeKind) -> list[str]:
    keys = Placement.not_of(kind)
    devices = settings.get("devices") if isinstance(settings, dict) else None
    if isinstance(devices, list | tuple) and len(devices) == 1:
        keys = tuple(key for key in keys if key != "devices")  # any runtime has one worker's device
    return _drop(settings, keys, f"stages.{name}.placement", kind)


def _drop(settings: Any, keys: Sequence[str], place: str, kind: str) -> list[str]:
    if not isinstance(settings, dict):
        return []
    return [
        f"{place}.{key}: {settings.pop(key)} is not for runtime {kind}; left out"
        for key in keys
        if key in settings
    ]


_FILE = "config.json"
_MAX_BYTES = 10_000_000


def local_config(model: str) -> Mapping[str, Any] | None:
    """Read a model's config, if that requires neither the network nor building the model.

    Returns:
        The content of its ``config.json``, or the model type of a GGUF file; None if it is not on
        this machine or cannot be read, which loading the model will report.
    """
    if model.startswith(SEEDED_PREFIX):
        seeded = SEEDED_MODELS.get(model.removeprefix(SEEDED_PREFIX))
        return None if seeded is None else seeded.known_fields
    try:
        if (gguf := find_gguf(Path(model))) is not None:
            return {"model_type": read_gguf_header(gguf).architecture}
        file = Path(model, _FILE) if Path(model).is_dir() else _cached_config(model)
        return None if file is None else read_json_object(file, most_bytes=_MAX_BYTES)
    except (OSError, ValueError):
        return None


def _cached_config(hub_id: str) -> Path | None:
    """Return the path of a hub model's config in the local cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(hub_id, _FILE)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


_ADDRESS = re.compile(r"auto|([\w.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}")
_CLIENT = "ray://"
OBJECT_STORE = "object_store"


def _known_kind(value: Any) -> Any:
    if isinstance(value, str) and value not in _KINDS:
        raise ValueError(f"unknown runtime {value[:80]!r}{suggest(value, _KINDS)}")
    return value


def check_address(address: str) -> str:
    """Return a valid address of a Ray cluster unchanged; raise ``ValueError`` otherwise."""
    if address.startswith(_CLIENT):
        raise ValueError(
            f"got {address[:80]!r}, for Ray's remote clients, through which no tensors can be "
            "shared; run on a node of the cluster, and give host:port (6379 unless it was changed)"
        )
    port = address.rpartition(":")[2]
    if not _ADDRESS.fullmatch(address) or (address != "auto" and not 0 < int(port) < 2**16):
        raise ValueError(f"must be host:port or auto, got {address[:80]!r}; such as 127.0.0.1:6379")
    return address


class RuntimeConfig(Settings):
    """The runtime of a pipeline's stages. The output is the same in all of them.

    Attributes:
        kind: ``inline`` runs all stages by turns in this process, ``processes`` each in separate
            processes on this machine, ``ray`` in actors of a Ray cluster.
        address: address of the Ray cluster to join, with this machine as a node: ``host:port``, or
            ``auto`` for one that runs here; None joins one that runs here, or starts one.
        tensor_transport: transport of tensors between stages in a Ray cluster: ``object_store``,
            or one of Ray's direct transports, such as ``nixl``.
        max_retries: maximum number of retries of a request whose worker died.
        stall_timeout_s: seconds without a heartbeat after which a worker counts as dead.
    """

    kind: Annotated[RuntimeKind, BeforeValidator(_known_kind)] = "inline"
    address: Annotated[str, AfterValidator(check_address)] | None = None
    tensor_transport: str = Field(default=OBJECT_STORE, pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")
    max_retries: int = Field(default=1, ge=0)
    stall_timeout_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_mapping(cls, data: Any) -> Any:
        if isinstance(data, str):
            raise ValueError(f"is a mapping: write runtime: {{kind: {data[:80]}}}")
        return data

    @model_validator(mode="after")
    def _check_kind_settings(self) -> Self:
        given = {"address": self.address, "tensor_transport": self.direct_transport}
        for key, value in given.items():
            if value is not None and self.kind != "ray":
                raise PlacedError(
                    (key,),
                    f"{value!r} is for a Ray cluster; it needs kind: ray (or --runtime ray), not "
                    f"{self.kind!r}, or leave it out",
                )
        return self

    @property
    def direct_transport(self) -> str | None:
        """Ray's transport for direct tensor transfers; None for the object store."""
        return None if self.tensor_transport == OBJECT_STORE else self.tensor_transport

    @classmethod
    def parse(
        cls, given: str | RuntimeConfig | None, own: RuntimeConfig | None = None
    ) -> RuntimeConfig:
        """Parse the ``runtime`` argument of ``Omni``.

        Args:
            given: a kind of runtime; a whole configuration; or None for the pipeline's own.
            own: the pipeline's own runtime. A given kind replaces only its kind; settings that this
                kind does not have are dropped with a warning.

        Raises:
            ValueError: there is no such kind, or ``given`` is something else.
        """
        own = cls() if own is None else own
        if given is None:
            return own
        if isinstance(given, RuntimeConfig):
            return given
        kinds = ", ".join(map(repr, _KINDS))
        check_argument("runtime", given, str, f"one of {kinds}, a RuntimeConfig or None")
        settings = own.model_dump(exclude_defaults=True)
        tell(runtime_for(settings, given))
        return cls(**(settings | {"kind": given}))


def resolve_threads(placements: Mapping[str, Placement], cores: int) -> dict[str, int]:
    """Distribute a machine's cores among the workers of a pipeline.

    Stages with a configured number of threads get it; stages that share a worker take turns, so
    their worker gets the maximum of their numbers. The remaining cores are divided evenly among
    the other workers, at least one for each. The remainder of the division goes to the first
    stages, as far as it suffices for one more per replica.

    Returns:
        For every stage the number of threads of each of its workers, while it steps there.
    """
    threads = {name: each.threads for name, each in placements.items() if each.threads is not None}
    workers = [names for _, names in stages_by_worker(placements)]
    taken = 0
    open_workers = []
    for names in workers:
        if all(name in threads for name in names):
            taken += placements[names[0]].replicas * max(threads[name] for name in names)
        else:
            open_workers.append(names)
    num_workers = sum(placements[names[0]].replicas for names in open_workers)
    share, left = divmod(max(cores - taken, 0), max(num_workers, 1))
    for names in open_workers:
        replicas = placements[names[0]].replicas
        has_more = share > 0 and replicas <= left
        left -= replicas if has_more else 0
        for name in names:
            threads.setdefault(name, max(share, 1) + has_more)
    return {name: threads[name] for name in placements}


def stages_by_worker(placements: Mapping[str, Placement]) -> list[tuple[str, list[str]]]:
    """Return each worker's name, shared or that of its only stage, and its stages in order."""
    workers: dict[tuple[bool, str], list[str]] = {}
    for name, placement in placements.items():
        worker = placement.worker
        workers.setdefault((worker is None, worker or name), []).append(name)
    return [(name, stages) for (_, name), stages in workers.items()]
