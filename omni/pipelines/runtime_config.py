"""Settings of where the stages of a pipeline run, and what each of their workers gets.

What a file says for its own runtime is left out, with a warning, where another runtime is given.
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
_OF_A_CLUSTER = ("address", "tensor_transport")


def leave_behind(data: dict[str, Any], overrides: Mapping[str, Any]) -> list[str]:
    """Take out of a file what the runtime does not have that is given in place of the file's own.

    So the same file runs everywhere. Where no other runtime is given, what the file says stays, and
    is refused if the file's own runtime does not have it. What comes by an override is refused
    likewise: to ask for replicas and for the inline runtime at once is a contradiction.

    Args:
        data: of the file, before anything is replaced; changed in place.
        overrides: values by dotted place, which replace the file's.

    Returns:
        What is left out, for :func:`tell`, if nothing else is wrong.
    """
    kind = _kind_in(overrides)
    if kind not in _KINDS:
        return []
    left = runtime_for(data.get("runtime"), kind)
    stages = data.get("stages")
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        if isinstance(stage, dict):
            left += _drop_of_placement(name, stage.get("placement"), kind)
    return left


def runtime_for(settings: Any, kind: str) -> list[str]:
    """Take out of a runtime's settings what one of another kind does not have, for :func:`tell`."""
    if kind == "ray" or kind not in _KINDS:
        return []
    return _drop(settings, _OF_A_CLUSTER, "runtime", kind)


def placement_for(name: str, placement: Placement, kind: RuntimeKind) -> Placement:
    """Where a stage runs in a runtime given in its own's place; warns of what is left out."""
    settings = placement.model_dump(exclude_defaults=True)
    left = _drop_of_placement(name, settings, kind)
    tell(left)
    return Placement(**settings) if left else placement


def tell(left: list[str]) -> None:
    """Warn of what was left out."""
    for each in left:
        _LOG.warning("%s", each)


def _kind_in(overrides: Mapping[str, Any]) -> Any:
    """The kind of runtime that overrides give; None where they leave it to the file."""
    kind: Any = None
    for place, value in overrides.items():
        if place == "runtime.kind":
            kind = value
        elif place == "runtime" and isinstance(value, dict):
            kind = value.get("kind", "inline")
    return kind


def _drop_of_placement(name: str, settings: Any, kind: RuntimeKind) -> list[str]:
    keys = Placement.not_of(kind)
    devices = settings.get("devices") if isinstance(settings, dict) else None
    if isinstance(devices, list | tuple) and len(devices) == 1:
        keys = tuple(key for key in keys if key != "devices")  # one worker has one everywhere
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
    """Read what a model says of itself, if that takes neither a network nor building it.

    Returns:
        The content of its ``config.json``, or the kind of model by a GGUF file; None where it is
        not here or cannot be read, which loading the model will tell.
    """
    if model.startswith(SEEDED_PREFIX):
        seeded = SEEDED_MODELS.get(model.removeprefix(SEEDED_PREFIX))
        return None if seeded is None else seeded.says
    try:
        if (gguf := find_gguf(Path(model))) is not None:
            return {"model_type": read_gguf_header(gguf).architecture}
        file = Path(model, _FILE) if Path(model).is_dir() else _cached(model)
        return None if file is None else read_json_object(file, most_bytes=_MAX_BYTES)
    except (OSError, ValueError):
        return None


def _cached(hub_id: str) -> Path | None:
    """Where a download of the hub's has put it."""
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
    """Return a Ray cluster's address if it has the form of one; else ``ValueError``."""
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
    """Where the stages of a pipeline run. What comes out is the same everywhere.

    Attributes:
        kind: ``inline`` runs all stages by turns in this process, ``processes`` each in processes
            of its own on this machine, ``ray`` in the actors of a Ray cluster.
        address: of the Ray cluster to join, which this machine is a node of: ``host:port``, or
            ``auto`` for one that runs here; None joins one that runs here, or starts one.
        tensor_transport: of a Ray cluster, by which tensors go from stage to stage:
            ``object_store``, or one of Ray's direct transports, such as ``nixl``.
        max_retries: how often a request is run again that was in a worker when this died.
        stall_timeout_s: seconds without a sign of life after which a worker counts as dead.
    """

    kind: Annotated[RuntimeKind, BeforeValidator(_known_kind)] = "inline"
    address: Annotated[str, AfterValidator(check_address)] | None = None
    tensor_transport: str = Field(default=OBJECT_STORE, pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")
    max_retries: int = Field(default=1, ge=0)
    stall_timeout_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _is_a_mapping(cls, data: Any) -> Any:
        if isinstance(data, str):
            raise ValueError(f"is a mapping: write runtime: {{kind: {data[:80]}}}")
        return data

    @model_validator(mode="after")
    def _has_what_its_kind_has(self) -> Self:
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
        """Ray's, by which tensors go directly from stage to stage; None for the object store."""
        return None if self.tensor_transport == OBJECT_STORE else self.tensor_transport

    @classmethod
    def parse(
        cls, given: str | RuntimeConfig | None, own: RuntimeConfig | None = None
    ) -> RuntimeConfig:
        """Understand what ``Omni(..., runtime=...)`` takes.

        Args:
            given: the kind of runtime; a whole configuration; or None, for the pipeline's own.
            own: what the pipeline says. A kind that is given replaces only its kind, and what one
                of that kind does not have is left out with a warning.

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
    """Share a machine's cores out among the workers of a pipeline.

    Stages that say how many threads they want have them; stages that share a worker take turns, so
    that it has as many as the one that wants most. What they leave is divided evenly among the
    other workers, each of which gets one at least; what does not divide goes to the stages that
    come first, as far as it gives every replica one more.

    Returns:
        For every stage the threads of each of its workers, while it steps there.
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
    """The names of workers, shared ones or those of their only stage, and their stages in order."""
    workers: dict[tuple[bool, str], list[str]] = {}
    for name, placement in placements.items():
        worker = placement.worker
        workers.setdefault((worker is None, worker or name), []).append(name)
    return [(name, stages) for (_, name), stages in workers.items()]
