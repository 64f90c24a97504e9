"""A Hugging Face checkpoint: its config, and its weights one tensor at a time.

Checkpoints that hold several models, each of which a stage of its own runs.

::

    config.json              weights
    first_config             first.layers.0...       one part
    second_config            second.layers.0...      another"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from engine.checkpoints.config_file import (
    CONFIG_FILE,
    check_files,
    load_config,
    load_generation_config,
    read_config_file,
)
from engine.checkpoints.gguf_checkpoint import (
    GGUFWeights,
    gguf_config,
    gguf_generation_config,
)
from engine.checkpoints.quantized_weight import Target
from engine.files.gguf_header import GGUFHeader, find_gguf, read_gguf_header
from engine.files.json_file import file_inside, read_json_object

__all__ = ["ENTRY_POINTS", "Checkpoint", "CheckpointPart", "WeightFiles", "folder_of_source"]

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Of safetensors, with the types of torch. Others are integers, or parts of quantized weights,
# which mean nothing without their scales.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_LISTED = 8


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a checkpoint, in one file or in several that an index names."""

    folder: Path

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Tensor name to the name of the file that holds it; reads one header at most.

        Raises:
            ValueError: there are no safetensors weights, the index is malformed, or a file that
                it names is not there or not in the folder.
        """
        if (self.folder / _INDEX_FILE).is_file():
            return self._read_index()
        if not (self.folder / _SINGLE_FILE).is_file():
            raise ValueError(self._no_weights_message())
        with self._opened(_SINGLE_FILE) as file:
            return dict.fromkeys(file.keys(), _SINGLE_FILE)

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one by one, on the CPU, in the type they are stored in.

        Raises:
            ValueError: a tensor is not there, or a file is damaged.
        """
        for file, members in self._by_file(names):
            for name in members:
                yield name, file.get_tensor(name)

    def check(self, expected: Mapping[str, Target]) -> None:
        """Compare headers with the places that weights are meant for; reads no weights.

        Args:
            expected: by name, what will receive the tensor. The type of its numbers may differ.

        Raises:
            ValueError: a tensor is not there, differs in shape, or does not hold
                floating-point numbers; or a file is damaged.
        """
        for file, members in self._by_file(expected):
            for name in members:
                stored, target = file.get_slice(name), expected[name]
                shape, kind = tuple(stored.get_shape()), stored.get_dtype()
                if shape != tuple(target.shape):
                    raise ValueError(
                        f"{name} in {self.folder} has shape {shape}; "
                        f"its config asks for {tuple(target.shape)}"
                    )
                if target.is_floating_point() and kind not in _FLOATS:
                    raise ValueError(
                        f"{name} in {self.folder / self.files[name]} is of the type {kind}; "
                        f"weights must be of {', '.join(sorted(_FLOATS))} (quantized ones are not "
                        "supported)"
                    )

    def rows(self, name: str, indices: Sequence[int]) -> Tensor:
        """Read single rows of a matrix, and nothing else of it.

        Returns:
            ``(len(indices), width)`` on the CPU, in the type it is stored in.

        Raises:
            ValueError: there is no such matrix, or it has no such row.
        """
        for file, _ in self._by_file([name]):
            matrix = file.get_slice(name)
            shape = matrix.get_shape()
            if len(shape) != 2:
                raise ValueError(f"{name} in {self.folder} must be a matrix, its shape is {shape}")
            wrong = [index for index in indices if not 0 <= index < shape[0]]
            if wrong:
                raise ValueError(
                    f"{name} in {self.folder} has rows 0 to {shape[0] - 1}, asked for {wrong}"
                )
            rows = torch.cat([matrix[index : index + 1] for index in indices])
        return rows

    def _by_file(self, names: Collection[str]) -> Iterator[tuple[Any, list[str]]]:
        """Each file, open, with those of the tensors that it holds."""
        missing = [name for name in names if name not in self.files]
        if missing:
            raise ValueError(f"{self.folder} lacks the weights {listed(missing)}")
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        for file_name, members in by_file.items():
            with self._opened(file_name) as file:
                held = set(file.keys())
                lacking = [name for name in members if name not in held]
                if lacking:
                    raise ValueError(
                        f"{self.folder / _INDEX_FILE} says that {file_name} holds "
                        f"{listed(lacking)}, which it does not"
                    )
                yield file, members

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        path = file_inside(self.folder, name)
        try:
            with open_safetensors(path) as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no readable safetensors file: {error}") from error

    def _read_index(self) -> dict[str, str]:
        index = self.folder / _INDEX_FILE
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} is no index of shards: weight_map must be an object")
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise ValueError(
                    f"{index} is no index of shards: {name} must be in a file, got {file!r}"
                )
        shards = sorted(set(weight_map.values()))
        for name in shards:
            try:
                file_inside(self.folder, name)
            except ValueError as error:
                raise ValueError(f"{index} names the shard {name!r}: {error}") from error
        return weight_map

    def _no_weights_message(self) -> str:
        pickled = sorted(f.name for f in self.folder.iterdir() if f.suffix in _PICKLED_SUFFIXES)
        message = f"{self.folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}"
        if pickled:
            message += f"; its weights are pickled ({listed(pickled)}), convert them to safetensors"
        return message


def open_safetensors(path: Path) -> Any:
    """Open a file, whose header is checked."""
    return safe_open(path, framework="pt", device="cpu")


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:_LISTED])
    more = len(names) - _LISTED
    return f"{shown} and {more} more" if more > 0 else shown


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One model of several in a checkpoint.

    Attributes:
        name: by which users ask for it.
        whole: ``model_type`` of the whole config.
        config_name: its config's attribute in the whole config.
        prefix: of its weights' names.
        architecture: transformers' class for it; published configs name older ones.
        has_generation_config: whether ``generation_config.json`` is about this part.
    """

    name: str
    whole: str
    config_name: str
    prefix: str
    architecture: str
    has_generation_config: bool = False


def find_part(
    parts: Sequence[CheckpointPart], name: str | None, path: Path
) -> CheckpointPart | None:
    """Find the part that a user asks for; None if it is one model and none is asked for."""
    by_name = {part.name: part for part in parts}
    if not by_name:
        if name is not None:
            raise ValueError(f"{path} is one model without parts; got part={name!r}, leave it out")
        return None
    if name is None:
        raise ValueError(f"{path} holds several models; say by part which: {', '.join(by_name)}")
    if name not in by_name:
        close = difflib.get_close_matches(name, by_name, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{path} has no part {name!r}, but {', '.join(by_name)}{hint}")
    return by_name[name]


ENTRY_POINTS = "omni_pipeline.model_sources"
"""Group of the entry points by which packages bring names of models. An entry's name is what stands
before the colon; its object is a function from the whole reference to a folder."""

# Longer than the letter of a drive.
_REFERENCE = re.compile(r"([A-Za-z][\w+-]+):.*", re.DOTALL)


def folder_of_source(model: str) -> Path | None:
    """Ask the package that brings such names for the folder of a model, which it may build.

    Returns:
        The folder; None for what has no such form, as hub ids have not.

    Raises:
        ValueError: no installed package brings such names, or it has no such model.
    """
    match = _REFERENCE.fullmatch(model)
    if match is None:
        return None
    source = match[1]
    for entry_point in entry_points(group=ENTRY_POINTS, name=source):
        try:
            locate = entry_point.load()
        except Exception as error:  # whatever a package raises is this model's error
            raise ValueError(
                f"model {model!r}: {entry_point.value!r} cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        return Path(locate(model))
    known = sorted(f"{name}:" for name in entry_points(group=ENTRY_POINTS).names)
    raise ValueError(
        f"model {model!r}: no installed package brings models named {source}:...; known are "
        f"{', '.join(known) or 'none'}. After an update of an editable install: pip install -e ."
    )


# Weights in the Hugging Face layout, configs, tokenizers and chat templates. Nothing pickled but
# a speech model's voices, of which only tensors and numbers are read.
_WANTED_FILES = ["model*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "spk_dict.pt"]
# Of the dense layers behind the pooling of an embedding model.
_WANTED_FILES += ["*_Dense/model.safetensors"]


@dataclass(frozen=True)
class Checkpoint:
    """A model folder, one of several models in it, or a GGUF file.

    Attributes:
        path: the folder, or the file.
        config: the transformers config; of the part, if this is one.
        generation_config: from ``generation_config.json``, or None where there is none.
        part: which of several models this is. Its weights go by their names in the part, and no
            others are seen.
        trust_remote_code: whether its processors may come with their own Python code.
        gguf: what a GGUF file says of itself; None of a folder.
    """

    path: Path
    config: PreTrainedConfig
    generation_config: GenerationConfig | None
    part: CheckpointPart | None = None
    trust_remote_code: bool = False
    gguf: GGUFHeader | None = None

    @classmethod
    def open(
        cls,
        model: str | Path,
        *,
        part: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        parts_of: Callable[[Mapping[str, Any]], Sequence[CheckpointPart]] = lambda config: (),
    ) -> Checkpoint:
        """Open a folder, a GGUF file, or a model of the Hugging Face hub (put into its cache).

        Args:
            model: folder, file or folder with a GGUF file, hub id (``organisation/name``), or a
                name that a package brings, such as ``seeded:<name>``.
            revision: branch, tag or commit on the hub.
            trust_remote_code: whether the config may come with its own Python code.
            parts_of: the models that a folder with such a ``config.json`` holds; none if it is
                one. It may first teach transformers the config's type.

        Raises:
            ValueError: there is no such folder or hub model, it cannot be fetched, it has no
                ``config.json`` that transformers understands, or no such part; a file of it lies
                elsewhere, or a value of its configs cannot be. Names file and key.
        """
        path = _locate(str(model), revision, trust_remote_code)
        if (file := find_gguf(path)) is not None:
            find_part((), part, file)
            header = read_gguf_header(file)
            generation = gguf_generation_config(header)
            return cls(file, gguf_config(header), generation, gguf=header)
        check_files(path, _WANTED_FILES)
        parts = parts_of(read_config_file(path))
        config = load_config(path, trust_remote_code=trust_remote_code)
        found = find_part(parts, part, path)
        generation_config = load_generation_config(path)
        if found is not None:
            config = getattr(config, found.config_name)
            generation_config = generation_config if found.has_generation_config else None
        return cls(path, config, generation_config, found, trust_remote_code)

    @property
    def config_file(self) -> Path:
        """The file that the config was made of."""
        return self.path / CONFIG_FILE if self.gguf is None else self.path

    @property
    def stored(self) -> str | None:
        """How weights are stored, in words; None where that is how they are held."""
        if self.gguf is None:
            return None
        formats = GGUFWeights(self.gguf).formats
        counts = ", ".join(f"{count} tensors of {kind}" for kind, count in formats.items())
        return f"GGUF: {counts}; blocks are dequantized on load"

    @property
    def architecture(self) -> str:
        """The class name that the config states, or that the part has.

        Raises:
            ValueError: it states none.
        """
        if self.part is not None:
            return self.part.architecture
        architectures = getattr(self.config, "architectures", None)
        if not architectures:
            raise ValueError(f"{self.config_file} states no architectures")
        return str(architectures[0])

    @property
    def whole_config(self) -> PreTrainedConfig:
        """The config of the folder, also if this is one of several models in it.

        Raises:
            ValueError: the file has changed, and cannot be used any more.
        """
        if self.part is None:
            return self.config
        return load_config(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def weight_files(self) -> Mapping[str, str]:
        """Tensor name to the file that holds it; reads headers only.

        Raises:
            ValueError: there are no safetensors weights, or the index is malformed.
        """
        prefix = self._prefix
        return {
            name.removeprefix(prefix): file
            for name, file in self._whole.files.items()
            if name.startswith(prefix)
        }

    @property
    def _prefix(self) -> str:
        return "" if self.part is None else self.part.prefix

    @cached_property
    def _whole(self) -> WeightFiles | GGUFWeights:
        return WeightFiles(self.path) if self.gguf is None else GGUFWeights(self.gguf)

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one by one, on the CPU, in the type they are stored in.

        Args:
            names: which; all by default.

        Raises:
            ValueError: a name that is not there, or a file that is missing or damaged.
        """
        prefix = self._prefix
        wanted = self.weight_files.keys() if names is None else names
        for name, tensor in self._whole.tensors([f"{prefix}{name}" for name in wanted]):
            yield name.removeprefix(prefix), tensor

    def rows_of_whole(self, name: str, indices: Sequence[int]) -> Tensor:
        """Read single rows of a matrix, which may be another part's, and nothing else of it.

        Args:
            name: in the whole checkpoint, its part's prefix included.

        Returns:
            ``(len(indices), width)`` on the CPU, in the type it is stored in.

        Raises:
            ValueError: there is no such matrix, or it has no such row.
        """
        return self._whole.rows(name, indices)

    def unplaced(self, targets: Collection[str]) -> list[str]:
        """Names of the stored tensors that are not among the targets."""
        return [name for name in self.weight_files if name not in targets]

    def check_weights(
        self, targets: Mapping[str, Target], *, ignored: Collection[str] = frozenset()
    ) -> None:
        """Compare what is stored with its places, by the headers alone.

        Args:
            targets: tensor name to what will receive it; it may be on ``meta``.
            ignored: names that may be in the checkpoint without having a place.

        Raises:
            ValueError: tensors are missing, have no place, or differ in shape; or one that is to
                hold floating-point numbers holds others.
        """
        prefix = self._prefix
        missing = [name for name in targets if name not in self.weight_files]
        if missing:
            raise ValueError(f"{self.path} lacks the weights {listed(missing)}")
        unexpected = [name for name in self.unplaced(targets) if name not in ignored]
        if unexpected:
            raise ValueError(
                f"{self.path} holds weights that {self.architecture} has no place for: "
                + listed(unexpected)
            )
        self._whole.check({f"{prefix}{name}": tensor for name, tensor in targets.items()})

    def load_into(
        self, targets: Mapping[str, Target], *, ignored: Collection[str] = frozenset()
    ) -> None:
        """Copy every tensor to its place, converting type and device on the way.

        At any time at most one tensor of the checkpoint is in memory beside the targets.

        Args:
            targets: tensor name to the tensor, slice or part of a weight that receives it.
            ignored: names that may be in the checkpoint without having a place.

        Raises:
            ValueError: see :meth:`check_weights`; nothing has been copied then.
        """
        self.check_weights(targets, ignored=ignored)
        for name, tensor in self.weights(targets):
            targets[name].copy_(tensor)


def _locate(model: str, revision: str | None, trust_remote_code: bool) -> Path:
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ValueError(
            f"model {model!r} is a file; a checkpoint is a folder with a config.json, or a "
            ".gguf file"
        )
    folder = folder_of_source(model)
    if folder is not None:
        return folder
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if looks_like_path:
        raise ValueError(f"model folder {model!r} does not exist (and it is no hub id)")
    wanted = [*_WANTED_FILES, "*.py"] if trust_remote_code else _WANTED_FILES
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(
            f"model {model!r} is no folder here, and it could not be fetched from the "
            f"Hugging Face hub: {error}"
        ) from error
