"""Base classes of stage configurations, and the registry of stage kinds."""

from __future__ import annotations

import json
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar, get_args, get_type_hints

from pydantic import (
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from engine.interface.config import EngineConfig, EngineSettings
from engine.interface.placed_error import PlacedError, described, suggest
from engine.interface.sampling_params import SamplingParams
from engine.interface.settings import Settings
from stages.placement import Placement
from stages.stage import OneOrMore, Stage, StageInputs, check_methods, located_by
from stages.transforms.user_code import load_custom, locate_custom

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENTRY_POINTS = "omni_pipeline.stage_kinds"
"""Entry point group of installed packages: name of the kind, and its configuration class."""

_ConfigT = TypeVar("_ConfigT", bound="StageConfig")
_KINDS: dict[str, type[StageConfig]] = {}
_KINDS_BY_CLASS: dict[str, type[StageConfig]] = {}
"""Kinds that are named by their class, as last loaded."""


ModelReference = Annotated[str, Field(min_length=1), located_by("locate_model")]
"""Folder, hub id, or a name that the validation's context resolves to one of them by an optional
function ``locate_model``."""


def _set_built_of(build: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(build)
    def build_stage(self: StageConfig, name: str) -> Any:
        stage = build(self, name)
        if isinstance(stage, Stage):  # overrides the configuration of a nested build_stage
            stage.built_of = self
        return stage

    return build_stage


class StageConfig(Settings):
    """Configuration of one stage in a YAML file, and factory of the stage.

    A kind of stage is a subclass, registered by :func:`register_stage_kind`, or named by its
    location: ``kind: file.py:Class``, ``kind: package.module:Class``. It declares its kind as a
    ``Literal``, and the model as a ``ModelReference`` if it requires one. A relative path in a
    field of type ``Path`` is resolved against the YAML file's folder. Its module imports the engine
    only when a stage is built, so that configurations are checked without torch.

    Attributes:
        kind: kind of the stage; it determines the other keys.
        model: folder, ``.gguf`` file, hub id, or ``seeded:<name>`` for a small checkpoint that is
            built on first use.
        part: name of a model in a checkpoint that holds several.
        inputs: the stages that feed this one; without it the stage gets the user's prompt.
        final_output: outputs of this stage for the user; each kind declares its supported forms.
        placement: workers and devices of the stage.
        takes_chunks: True if such a stage may begin while its source still runs.
        gives_chunks: True if its outputs may be sent on while it still runs.
    """

    takes_chunks: ClassVar[bool] = False
    gives_chunks: ClassVar[bool] = False

    kind: str
    model: ModelReference | None = None
    part: str | None = Field(default=None, min_length=1)
    inputs: StageInputs | None = None
    final_output: Annotated[tuple[str, ...], OneOrMore] = ()
    placement: Placement = Field(default=Placement(), description="where the stage runs")

    _location: str | None = PrivateAttr(default=None)

    @property
    def kind_reference(self) -> str:
        """Name of this kind that is valid in any file: the location of its class, if it has one."""
        return self._location or self.kind

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Wrap ``build_stage`` of subclasses to set ``built_of`` of the stage."""
        super().__pydantic_init_subclass__(**options)
        build = vars(cls).get("build_stage")
        if build is not None:
            cls.build_stage = _set_built_of(build)  # type: ignore[method-assign]

    @field_validator("*", mode="after")
    @classmethod
    def _resolve_path(cls, value: Any, info: ValidationInfo) -> Any:
        folder = (info.context or {}).get("folder")
        if folder is None or not isinstance(value, Path):
            return value
        return (folder / value.expanduser()).absolute()

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        for device in self.placement.all_devices:
            self._check_device(device)
        return self

    def on_device(self, device: str | None) -> Self:
        """Return a copy with another device for the engine, or itself for None.

        Raises:
            ValueError: a stage of this kind has no device.
        """
        self._check_device(device)
        if device is None:
            return self
        engine: Settings = self.engine  # type: ignore[attr-defined]
        return self.model_copy(update={"engine": engine.model_copy(update={"device": device})})

    def _check_device(self, device: str | None) -> None:
        if device is None:
            return
        if getattr(getattr(self, "engine", None), "device", None) is None:
            key = "device" if self.placement.devices is None else "devices"
            raise PlacedError(
                ("placement", key), f"a stage of kind {self.kind!r} has no device; leave it out"
            )

    @abstractmethod
    def build_stage(self, name: str) -> Stage:
        """Build the stage and load its model.

        Raises:
            ValueError: it cannot be built as configured.
        """

    def misfit(self, config: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return a key that does not fit a ``config.json``, and the problem; None: none known."""
        return None

    def emitted(self, config: Mapping[str, Any]) -> Collection[str] | None:
        """Return tensors that a ``config.json``'s model emits; None: unknown until it is loaded."""
        return None

    def modalities(self, config: Mapping[str, Any]) -> Collection[str] | None:
        """Return the modalities of prompts: text, image, audio, video; None if unknown."""
        return None

    def load_speakers(self) -> tuple[str, ...] | None:
        """Read the ``speakers`` of such a :class:`~stages.stage.Stage` without loading its model.

        None: it does not speak, or they are unknown until it is loaded; ``ValueError``: they cannot
        be read.
        """
        return None

    @property
    def own_sampling(self) -> SamplingParams | None:
        """Default sampling parameters of requests; None if such a stage samples nothing."""
        return None

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Read the ``tokenizer`` of such a :class:`~stages.stage.Stage` in another process.

        None: such a stage generates no text, or its model has no tokenizer.

        Raises:
            ValueError: the tokenizer cannot be read.
        """
        return None

    @classmethod
    def model_for(cls, data: Mapping[str, Any]) -> type[StageConfig]:
        """Return the class that validates a mapping: that of its kind, or else this one."""
        kind = str(data.get("kind"))
        return _KINDS.get(kind) or _KINDS_BY_CLASS.get(kind, cls)


class TokenStageConfig(StageConfig):
    """Base configuration of kinds whose engine reads tokens.

    Attributes:
        engine: settings of the engine.
        outputs: names of the tensors to output; None: all that the model emits.
    """

    model: ModelReference
    engine: EngineSettings = EngineSettings()
    outputs: Annotated[tuple[str, ...], OneOrMore] | None = None

    @model_validator(mode="after")
    def _check_tensor_parallel(self) -> Self:
        if self.engine.tensor_parallel > 1 and self.placement.replicas > 1:
            raise PlacedError(
                ("engine", "tensor_parallel"),
                f"{self.engine.tensor_parallel} processes take the devices that the other of "
                f"{self.placement.replicas} replicas are on; leave placement.replicas out",
            )
        return self

    def engine_config(self) -> EngineConfig:
        """Join model and engine settings."""
        return EngineConfig(model=self.model, part=self.part, **self.engine.model_dump())


def register_stage_kind(config: type[_ConfigT]) -> type[_ConfigT]:
    """Decorator that registers the configuration of a kind of stage for YAML files::

        @register_stage_kind
        class ShoutStageConfig(StageConfig):
            kind: Literal["shout"]
            mark: str = "!"

            def build_stage(self, name: str) -> Stage:
                return ShoutStage(name, self.mark, inputs=self.inputs)

    An installed package declares its kinds in the entry point group ``omni_pipeline.stage_kinds``:
    ``shout = "package.module:ShoutStageConfig"``.

    A module that is imported a second time, as a file of transforms, may register its kinds again.

    Raises:
        ValueError: ``kind`` is no ``Literal`` of one name, or the kind exists already.
    """
    given: object = config  # an entry point may name anything
    if not isinstance(given, type) or not issubclass(given, StageConfig):
        raise ValueError(f"a kind of stage is a subclass of StageConfig, got {given!r}")
    names = get_args(config.model_fields["kind"].annotation)
    if len(names) != 1 or not isinstance(names[0], str):
        raise ValueError(
            f"{config.__qualname__} must declare its kind as a Literal of one name, such as "
            'kind: Literal["shout"]'
        )
    known = _KINDS.setdefault(names[0], config)
    if known is not config and _source_location(known) != _source_location(config):
        raise ValueError(
            f"a stage kind named {names[0]!r} is registered already, by {known.__module__}:"
            f"{known.__qualname__}; give it another name"
        )
    return config


def _source_location(config: type[StageConfig]) -> tuple[object, ...]:
    file = getattr(sys.modules.get(config.__module__), "__file__", None)
    return (id(config),) if file is None else (os.path.realpath(file), config.__qualname__)


def parse_stage_config(
    data: Any, *, from_file: bool = False, context: Mapping[str, Any] | None = None
) -> StageConfig:
    """Validate the settings of one stage by its kind.

    Args:
        data: a mapping with ``kind``; a configuration is returned unchanged.
        from_file: if true, types are those of JSON, and strict: a number in quotes is no number.
        context: validation context; see ``ModelReference``. Its ``folder`` is searched first for
            files and modules.

    Raises:
        ValueError: the settings are invalid, as described by pydantic.
    """
    if isinstance(data, StageConfig):
        return data
    if not isinstance(data, dict):
        raise PydanticKnownError("dict_type")
    if "kind" not in data:
        raise PydanticKnownError("union_tag_not_found", {"discriminator": "'kind'"})
    kind = str(data["kind"])
    folder = (context or {}).get("folder")
    config = _stage_kind(kind, folder)
    if config is None:
        hint = suggest(kind, stage_kind_names())
        if not hint.endswith("?"):
            own = f"file.py:Class, or by an entry point {ENTRY_POINTS!r} of its package"
            hint += f"; one of your own is named as {own}"
        raise PlacedError(("kind",), f"unknown kind {kind[:80]!r}{hint}")
    try:
        _check_kind(config)
    except ValueError as error:
        raise PlacedError(("kind",), f"kind {kind!r}: {error}") from error
    if ":" in kind:
        named = get_args(config.model_fields["kind"].annotation)
        data = data | {"kind": named[0] if named else kind}
    if from_file:
        # From JSON, strict validation still accepts a list for a tuple.
        parsed = config.model_validate_json(json.dumps(data), strict=True, context=context)
    else:
        parsed = config.model_validate(data, context=context)
    if ":" in kind:
        parsed._location = locate_custom(kind, folder, what="kind")
    return parsed


def _check_kind(config: type[StageConfig]) -> None:
    """Reject a kind if its class, or that of the stage it builds, lacks methods.

    The stage's class is the annotated return type of ``build_stage``. If it has subclasses, or
    declares abstract methods itself, it may be a base class of the built stage, and is not checked.

    Raises:
        ValueError: names the class and the methods.
    """
    check_methods(config)
    try:
        built = get_type_hints(config.build_stage).get("return")
    except Exception:  # names that only type checkers can see
        return
    if not (isinstance(built, type) and issubclass(built, Stage)):
        return
    if not built.__subclasses__() and built.__abstractmethods__.isdisjoint(vars(built)):
        check_methods(built)


def stage_kind_names() -> tuple[str, ...]:
    """Return all kinds for YAML files, without loading those of installed packages."""
    return tuple(dict.fromkeys((*_KINDS, *entry_points(group=ENTRY_POINTS).names)))


def stage_kinds() -> dict[str, type[StageConfig]]:
    """Return all kinds with their configurations; ``ValueError``: a package's failed to load."""
    kinds = {name: _stage_kind(name) for name in stage_kind_names()}
    return {name: config for name, config in kinds.items() if config is not None}


def _stage_kind(name: str, folder: Path | None = None) -> type[StageConfig] | None:
    """Find the configuration of a kind; None if there is no such kind.

    Raises:
        ValueError: the kind's class does not exist, or cannot be loaded.
    """
    if ":" in name:
        try:
            found = load_custom(locate_custom(name, folder, what="kind"), what="kind")
            if not isinstance(found, type) or not issubclass(found, StageConfig):
                raise ValueError(f"kind {name!r} is no subclass of omni.StageConfig")
        except ValueError as error:
            raise PlacedError(("kind",), str(error)) from error
        _KINDS_BY_CLASS[name] = found
        return found
    if name not in _KINDS:
        for entry_point in entry_points(group=ENTRY_POINTS, name=name):
            try:
                register_stage_kind(entry_point.load())
            except Exception as error:  # a package may raise anything; report it for this kind
                raise ValueError(
                    f"kind {name!r}: {entry_point.value!r} cannot be loaded: {described(error)}"
                ) from error
            if name not in _KINDS:
                raise ValueError(f"kind {name!r}: {entry_point.value!r} is of another kind")
    return _KINDS.get(name)
