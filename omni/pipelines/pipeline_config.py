"""Settings of a pipeline's YAML file, and the check that its runtime is available."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from engine.files.gguf_header import find_gguf
from engine.interface.arguments import check_argument
from engine.interface.placed_error import KeyPath, PlacedError, suggest
from engine.interface.settings import Settings, explain_validation_error
from omni.pipelines.config_file import ConfigError, find_config, override, parse_yaml
from omni.pipelines.graph_rules import GraphError, check_graph, sources_of, topological_order
from omni.pipelines.runtime_config import (
    RuntimeConfig,
    leave_behind,
    local_config,
    placement_for,
    tell,
)
from omni.pipelines.voices import RecordedVoice, Voices
from omni.seeded.checkpoints import SEEDED_MODELS, SEEDED_PREFIX, resolve_model
from stages import StageConfig
from stages.cluster.cluster_address import find_cluster
from stages.placement import Placement
from stages.portable import check_portable
from stages.stage_config import parse_stage_config
from stages.transforms.registry import is_custom, locate_transform

ToolFormat: TypeAlias = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def _check_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", value):
        raise ValueError("a name starts with a letter and has letters, digits, '_' and '-' only")
    return value


# Names become parts of file names, and of dotted paths such as stages.writer.engine.
Name = Annotated[str, AfterValidator(_check_name)]


def _parse_stage(value: Any, info: ValidationInfo) -> StageConfig:
    folders = info.context or {}
    return parse_stage_config(
        value,
        from_file=info.mode == "json",
        context={
            "locate_model": partial(_locate_model, base_dir=folders.get("model_dir")),
            "locate_transform": partial(locate_transform, folder=folders.get("base_dir")),
            "folder": folders.get("base_dir"),
        },
    )


class PipelineConfig(Settings):
    """A pipeline: stages by name, each naming the stages that feed it.

    Attributes:
        name: name of the pipeline.
        description: its purpose, in a sentence.
        examples: messages that the server's page offers to try.
        speaker: default voice of requests that name none; None for the checkpoint's first voice.
        voices: aliases of voices, such as ``{alloy: Ada}``, or recorded voices, such as
            ``{Ada: {audio: ada.wav}}``. OpenAI's stock names that are not listed are mapped to the
            voices in order.
        tool_parser: format of the model's tool calls in a server; ``auto`` detects it from the
            text.
        deterministic: set ``engine.deterministic`` of every stage.
        runtime: where the stages run.
        stages: stages by name, which form an acyclic graph.
    """

    name: Name
    description: str | None = None
    examples: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    speaker: str | None = Field(default=None, min_length=1)
    voices: dict[Annotated[str, Field(min_length=1)], str | RecordedVoice] = Field(
        default_factory=dict
    )
    tool_parser: ToolFormat = "auto"
    deterministic: bool = False
    runtime: RuntimeConfig = RuntimeConfig()
    stages: dict[Name, Annotated[SerializeAsAny[StageConfig], PlainValidator(_parse_stage)]] = (
        Field(min_length=1)
    )

    @classmethod
    def load(
        cls,
        config: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        flag: str = "overrides:",
        labels: Mapping[str, str] | None = None,
    ) -> PipelineConfig:
        """Read a pipeline from a YAML file.

        Values must have the right types: a number in quotes is not a number.

        Args:
            config: path of a YAML file, or the name of a shipped one, such as ``two_step``.
            overrides: values by dotted path (``"stages.writer.engine.num_blocks"``), which replace
                those of the file.
            flag: prefix of the path in messages about ``overrides``.
            labels: by path in ``overrides``, a label that replaces both in messages.

        Raises:
            ConfigError: there is no such file, or something in it or in ``overrides`` is wrong; the
                message names every wrong place.
        """
        overrides = overrides or {}
        check_argument("config", config, str | Path, "a path, or the name of a shipped pipeline")
        wanted = "a mapping of dotted places to values"
        check_argument("overrides", overrides, Mapping, wanted, '{"stages.writer.model": ...}')
        for place in overrides:
            check_argument("each place in overrides", place, str, "a str")
        text, label, folders = find_config(config)
        written, numbers = parse_yaml(text, label)
        if not isinstance(written, dict):
            raise ConfigError(f"{label}: expected a mapping with 'name' and 'stages'")
        # Through JSON, so that an override does not reach a mapping's other YAML aliases.
        data = json.loads(json.dumps(written, default=str))
        left = leave_behind(data, overrides)
        lines: dict[KeyPath, int | str] = dict(numbers)
        for place, value in overrides.items():
            named = (labels or {}).get(place, f"{flag} {place}")
            override(data, place, value, named)
            keys = tuple(place.split("."))
            lines = {key: line for key, line in lines.items() if key[: len(keys)] != keys}
            lines[keys] = named
        try:
            # From JSON, strict validation still takes a list for a tuple.
            read = cls.model_validate_json(
                json.dumps(data, default=str), strict=True, context=folders
            )
        except ValidationError as error:
            message = explain_validation_error(error, cls, data, source=label, lines=lines)
            raise ConfigError(message) from None
        tell(left)  # only now: if there is an error, only that is reported
        return read

    @model_validator(mode="after")
    def _check_stages(self) -> PipelineConfig:
        try:
            check_graph(self.stages, run_custom=False, emitted=self.emitted())
        except GraphError as error:
            raise PlacedError(error.place, error.problem) from error
        for name, stage in self.stages.items():
            if self.deterministic and not hasattr(getattr(stage, "engine", None), "deterministic"):
                problem = f"stage {name!r} cannot: its kind has no engine.deterministic"
                raise PlacedError(("deterministic",), problem)
            misplaced = stage.placement.misplaced(self.runtime.kind)
            if misplaced is not None:
                key, problem = misplaced
                raise PlacedError(("stages", name, "placement", key), problem)
            config = None if stage.model is None else local_config(stage.model)
            misfit = None if config is None else stage.misfit(config)
            if misfit is not None:
                key, problem = misfit
                raise PlacedError(("stages", name, key), f"model {stage.model!r}: {problem}")
        return self

    def emitted(self) -> dict[str, Collection[str]]:
        """Return the tensors that stages' models emit, if known from their checkpoints' configs."""
        return self._from_configs(lambda stage, config: stage.emitted(config))

    def modalities(self) -> dict[str, Collection[str]]:
        """Return the modalities that stages with the user's prompt support, where known."""
        known = self._from_configs(lambda stage, config: stage.modalities(config))
        return {name: taken for name, taken in known.items() if self.stages[name].inputs is None}

    def _from_configs(
        self, ask: Callable[[StageConfig, Mapping[str, Any]], Collection[str] | None]
    ) -> dict[str, Collection[str]]:
        """Call ``ask`` with each stage and its checkpoint's config, if that is on this machine."""
        known = {}
        for name, stage in self.stages.items():
            config = None if stage.model is None else local_config(stage.model)
            names = None if config is None else ask(stage, config)
            if names is not None:
                known[name] = names
        return known

    def check_speaker(self) -> None:
        """Check the speaker and the aliases of voices, as far as known before loading.

        Raises:
            ValueError: a stage has no such voice.
        """
        if self.speaker is None and not self.voices:
            return
        known = {name: self.resolved(name).load_speakers() for name in self.stages}
        speaking = {name: voices for name, voices in known.items() if voices is not None}
        if speaking or any(not isinstance(each, str) for each in self.voices.values()):
            Voices(self.stages, speaking, self.voices).find(self.speaker)

    def custom_transforms(self) -> dict[str, str]:
        """Return user code that runs when the pipeline is built: transforms' names by stage.

        Reading a configuration locates it, but runs none of it.
        """
        return {
            name: str(stage.inputs.transform)
            for name, stage in self.stages.items()
            if stage.inputs is not None and is_custom(stage.inputs.transform)
        }

    @property
    def placements(self) -> dict[str, Placement]:
        """Placement of each stage."""
        return {name: stage.placement for name, stage in self.stages.items()}

    def topological_order(self) -> list[str]:
        """Return the stages' names, each after all that feed it; otherwise in the file's order."""
        return topological_order(sources_of(self.stages))

    def with_runtime(self, runtime: str | RuntimeConfig | None) -> PipelineConfig:
        """Return the same pipeline with another runtime.

        Settings that the other runtime does not have are dropped, with a warning.

        Args:
            runtime: see :meth:`~omni.pipelines.runtime_config.RuntimeConfig.parse`.

        Raises:
            ValueError: there is no such runtime, or a device has another name there.
        """
        given = RuntimeConfig.parse(runtime, self.runtime)
        stages = {}
        for name, stage in self.stages.items():
            placement = placement_for(name, stage.placement, given.kind)
            misplaced = placement.misplaced(given.kind)
            if misplaced is not None:
                raise ValueError(f"stage {name!r}: placement.{misplaced[0]}: {misplaced[1]}")
            stages[name] = stage.model_copy(update={"placement": placement})
        return self.model_copy(update={"runtime": given, "stages": stages})

    def resolved(self, name: str, replica: int = 0) -> StageConfig:
        """Return a stage's settings with resolved model paths, building ``seeded:`` models.

        Raises:
            ValueError: a model cannot be built, or does not fit a stage of this kind.
        """
        stage = self.stages[name]
        data = stage.model_dump(by_alias=True)
        if self.deterministic:
            data["engine"]["deterministic"] = True
        device = stage.placement.all_devices[replica]
        if self.runtime.kind == "ray":
            device = stage.placement.device  # a worker sees only its own GPUs
        try:
            located = type(stage).model_validate(data, context={"locate_model": resolve_model})
            return located.on_device(device)
        except ValidationError as error:
            mistakes = explain_validation_error(error, type(stage), data)
            message = f"stage {name!r}: {mistakes}"
        raise ValueError(message)


def _locate_model(reference: str, base_dir: Path | None) -> str:
    """Find the folder of a reference; return a hub id or ``seeded:<name>`` unchanged.

    A relative folder is searched next to the file that names it, then in the working directory; a
    reference that is no existing folder but has the form of a hub id is one.

    Raises:
        ValueError: an unknown seeded model, a missing folder or one without a checkpoint, or
            something that is neither a path nor a hub id.
    """
    if reference.startswith(SEEDED_PREFIX):
        name = reference.removeprefix(SEEDED_PREFIX)
        if name not in SEEDED_MODELS:
            raise ValueError(f"unknown seeded model {name!r}{suggest(name, SEEDED_MODELS)}")
        return reference
    try:
        path = Path(reference).expanduser()
        candidates = [path] if base_dir is None or path.is_absolute() else [base_dir / path, path]
        folder = next((candidate for candidate in candidates if candidate.exists()), None)
        is_checkpoint = folder is not None and (
            (folder / "config.json").is_file() or find_gguf(folder) is not None
        )
    # The path is invalid or too long, or its home directory does not exist.
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"no such folder or file: {reference[:80]!r}: {reason}") from error
    if folder is not None:
        if not is_checkpoint:
            raise ValueError(
                f"{str(folder)!r} is no checkpoint: a folder with a config.json, or a .gguf file, "
                "is needed"
            )
        return str(folder)
    if reference.startswith((".", "~", "/")) or not _HUB_ID.fullmatch(reference):
        looked_in = " or ".join(dict.fromkeys(repr(str(place.absolute())) for place in candidates))
        raise ValueError(f"no such folder or file: {looked_in}")
    return reference


def check_runtime(config: PipelineConfig) -> None:
    """Check a pipeline's runtime as far as possible without starting it.

    Raises:
        ValueError: it cannot run; the message has the reason, its place and a remedy.
    """
    if config.runtime.kind != "inline":
        check_portable(config.stages)
    if config.runtime.kind == "ray":
        if find_spec("ray") is None:
            raise ValueError(
                "runtime.kind: 'ray' needs a package that is not installed: pip install -e "
                "'.[ray]' in a checkout of omni-pipeline"
            )
        find_cluster(config.runtime.address)
    else:
        check_devices(config.placements)


def cuda_devices() -> int:
    """Return the number of CUDA devices that torch sees."""
    import torch  # imported here only: slow, and not needed without CUDA devices

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_devices(placements: Mapping[str, Placement]) -> None:
    """Check that the CUDA devices of placements exist.

    Raises:
        ValueError: they do not, or there are fewer than replicas that need one each.
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
