"""What the configurations of all stage kinds share, and the kinds that there are."""

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
    AfterValidator,
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
from stages.stage import OneOrMore, Stage, StageInputs, check_methods
from stages.transforms.user_code import load_custom, locate_custom

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENTRY_POINTS = "omni_pipeline.stage_kinds"
"""Entry points of installed packages: the name is the kind's, the object its configuration."""

_ConfigT = TypeVar("_ConfigT", bound="StageConfig")
_KINDS: dict[str, type[StageConfig]] = {}
_IN_CODE: dict[str, type[StageConfig]] = {}
"""Kinds that are named by their class, as they were loaded last."""


def _located(value: str, info: ValidationInfo) -> str:
    locate: Callable[[str], str] | None = (info.context or {}).get("locate_model")
    return value if locate is None else locate(value)


ModelReference = Annotated[str, Field(min_length=1), AfterValidator(_located)]
"""Folder, hub id, or a name that the reader of the configuration turns into one of them: the
validation's context may have a function ``locate_model``."""


def _noting(build: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(build)
    def build_stage(self: StageConfig, name: str) -> Any:
        stage = build(self, name)
        if isinstance(stage, Stage):  # a class below this one may have built it of its own
            stage.built_of = self
        return stage

    return build_stage


class StageConfig(Settings):
    """One stage of a YAML file: what it says, and how the stage is made of it.

    A kind of stage is a subclass, made known by :func:`register_stage_kind`, or named by where it
    is: ``kind: file.py:Class``, ``kind: package.module:Class``. It declares its kind as a
    ``Literal``, and the model as a ``ModelReference`` if it cannot do without one. A relative path
    in a field of type ``Path`` starts at the YAML file's folder. Its module imports the engine only
    when a stage is built, so that configurations are checked without torch.

    Attributes:
        kind: which kind of stage this is; it decides which other keys there are.
        model: folder, ``.gguf`` file, hub id, or ``seeded:<name>`` for a small checkpoint that is
            built on first use.
        part: which model of a checkpoint that holds several, by its name there.
        inputs: the stages that feed this one; without it the stage gets the user's prompt.
        final_output: what the user gets of this stage; kinds redeclare which forms they have.
        placement: where it runs.
        takes_chunks: whether such a stage may begin while its source goes on.
        gives_chunks: whether its outputs may be handed on while it goes on.
    """

    takes_chunks: ClassVar[bool] = False
    gives_chunks: ClassVar[bool] = False

    kind: str
    model: ModelReference | None = None
    part: str | None = Field(default=None, min_length=1)
    inputs: StageInputs | None = None
    final_output: Annotated[tuple[str, ...], OneOrMore] = ()
    placement: Placement = Field(default=Placement(), description="where the stage runs")

    _named: str | None = PrivateAttr(default=None)

    @property
    def kind_reference(self) -> str:
        """What a file at any place names this kind by: the place of its class where it has one."""
        return self._named or self.kind

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Have every stage know what it was built of, however its kind builds it."""
        super().__pydantic_init_subclass__(**options)
        build = vars(cls).get("build_stage")
        if build is not None:
            cls.build_stage = _noting(build)  # type: ignore[method-assign]

    @field_validator("*", mode="after")
    @classmethod
    def _starts_at_the_file(cls, value: Any, info: ValidationInfo) -> Any:
        folder = (info.context or {}).get("folder")
        if folder is None or not isinstance(value, Path):
            return value
        return (folder / value.expanduser()).absolute()

    @model_validator(mode="after")
    def _devices_are_the_engines(self) -> Self:
        for device in self.placement.all_devices:
            self._check_device(device)
        return self

    def on_device(self, device: str | None) -> Self:
        """The same settings with another device, if any, for the engine.

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
        """Build the stage; its model is loaded.

        Raises:
            ValueError: it cannot be built as asked.
        """

    def misfit(self, config: Mapping[str, Any]) -> tuple[str, str] | None:
        """The key that does not fit a ``config.json``, and what is wrong; None: none is known."""
        return None

    def emitted(self, config: Mapping[str, Any]) -> Collection[str] | None:
        """Tensors that a model of a ``config.json`` emits; None: known once it is loaded."""
        return None

    def modalities(self, config: Mapping[str, Any]) -> Collection[str] | None:
        """What prompts are made of: text, image, audio, video; None where it is not known."""
        return None

    def load_speakers(self) -> tuple[str, ...] | None:
        """Read the ``speakers`` of such a :class:`~stages.stage.Stage` without loading its model.

        None: it does not speak, or they are known once it is loaded; ``ValueError``: they cannot
        be read.
        """
        return None

    @property
    def own_sampling(self) -> SamplingParams | None:
        """Parameters of requests that bring none; None if such a stage samples nothing."""
        return None

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Read the ``tokenizer`` of such a :class:`~stages.stage.Stage`, which is driven elsewhere.

        None: such a stage writes no text, or its model brings no tokenizer.

        Raises:
            ValueError: the tokenizer cannot be read.
        """
        return None

    @classmethod
    def model_for(cls, data: Mapping[str, Any]) -> type[StageConfig]:
        """The class that a mapping is checked against: that of its kind, where there is one."""
        kind = str(data.get("kind"))
        return _KINDS.get(kind) or _IN_CODE.get(kind, cls)


class TokenStageConfig(StageConfig):
    """What kinds share whose engine reads tokens.

    Attributes:
        engine: how the engine runs the model.
        outputs: names of the tensors to keep; None keeps all that the model puts out.
    """

    model: ModelReference
    engine: EngineSettings = EngineSettings()
    outputs: Annotated[tuple[str, ...], OneOrMore] | None = None

    @model_validator(mode="after")
    def _is_not_divided_and_repeated(self) -> Self:
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
    """Decorator that makes a kind of stage known to YAML files, by its configuration::

        @register_stage_kind
        class ShoutStageConfig(StageConfig):
            kind: Literal["shout"]
            mark: str = "!"

            def build_stage(self, name: str) -> Stage:
                return ShoutStage(name, self.mark, inputs=self.inputs)

    An installed package has its kinds found by naming them among the entry points
    ``omni_pipeline.stage_kinds``: ``shout = "package.module:ShoutStageConfig"``.

    A module that is imported a second time, as a file of transforms, may register its kinds again.

    Raises:
        ValueError: ``kind`` is no ``Literal`` of one name, or there is such a kind already.
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
    if known is not config and _written_at(known) != _written_at(config):
        raise ValueError(
            f"a stage kind named {names[0]!r} is registered already, by {known.__module__}:"
            f"{known.__qualname__}; give it another name"
        )
    return config


def _written_at(config: type[StageConfig]) -> tuple[object, ...]:
    file = getattr(sys.modules.get(config.__module__), "__file__", None)
    return (id(config),) if file is None else (os.path.realpath(file), config.__qualname__)


def parse_stage_config(
    data: Any, *, from_file: bool = False, context: Mapping[str, Any] | None = None
) -> StageConfig:
    """Check the settings of one stage against its kind.

    Args:
        data: a mapping with ``kind``; a configuration is returned as it is.
        from_file: whether types are JSON's, and must be right: a number in quotes is no number.
        context: of the validation; see ``ModelReference``. Its ``folder`` is where files and
            modules that are named by it are looked for first.

    Raises:
        ValueError: whatever is wrong, as pydantic tells it.
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
        # From JSON, strict validation still takes a list for a tuple.
        parsed = config.model_validate_json(json.dumps(data), strict=True, context=context)
    else:
        parsed = config.model_validate(data, context=context)
    if ":" in kind:
        parsed._named = locate_custom(kind, folder, what="kind")
    return parsed


def _check_kind(config: type[StageConfig]) -> None:
    """Refuse a kind whose own class, or that of the stage it builds, lacks methods.

    The stage's class is known where ``build_stage`` states it. One that others are derived from, or
    that declares abstract methods itself, may be stated in place of what is built.

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
    """All kinds that YAML files can name; those of installed packages are not loaded."""
    return tuple(dict.fromkeys((*_KINDS, *entry_points(group=ENTRY_POINTS).names)))


def stage_kinds() -> dict[str, type[StageConfig]]:
    """All kinds with their configurations; ``ValueError``: a package's cannot be loaded."""
    kinds = {name: _stage_kind(name) for name in stage_kind_names()}
    return {name: config for name, config in kinds.items() if config is not None}


def _stage_kind(name: str, folder: Path | None = None) -> type[StageConfig] | None:
    """Find the configuration of a kind; None if there is no such kind.

    Raises:
        ValueError: the kind's class is not there, or it cannot be loaded.
    """
    if ":" in name:
        try:
            found = load_custom(locate_custom(name, folder, what="kind"), what="kind")
            if not isinstance(found, type) or not issubclass(found, StageConfig):
                raise ValueError(f"kind {name!r} is no subclass of omni.StageConfig")
        except ValueError as error:
            raise PlacedError(("kind",), str(error)) from error
        _IN_CODE[name] = found
        return found
    if name not in _KINDS:
        for entry_point in entry_points(group=ENTRY_POINTS, name=name):
            try:
                register_stage_kind(entry_point.load())
            except Exception as error:  # whatever a user's package raises is this kind's error
                raise ValueError(
                    f"kind {name!r}: {entry_point.value!r} cannot be loaded: {described(error)}"
                ) from error
            if name not in _KINDS:
                raise ValueError(f"kind {name!r}: {entry_point.value!r} is of another kind")
    return _KINDS.get(name)
