"""A Hugging Face checkpoint: its config, and its weights one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from engine.checkpoints.checkpoint_parts import CheckpointPart, find_part
from engine.checkpoints.quiet_transformers import quiet_config_log

__all__ = ["Checkpoint"]

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Weights in the Hugging Face layout, configs, tokenizers and chat templates. Nothing pickled but
# a speech model's voices, of which only tensors and numbers are read.
_WANTED_FILES = ["model*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "spk_dict.pt"]
# Of the dense layers behind the pooling of an embedding model.
_WANTED_FILES += ["*_Dense/model.safetensors"]
# Buffers that old exports contain and that are computed from the config.
_COMPUTED = ("rotary_emb.inv_freq", "embeddings.position_ids")
_LISTED = 8


@dataclass(frozen=True)
class Checkpoint:
    """A model folder, or one of several models in it.

    Attributes:
        path: the folder.
        config: the transformers config; of the part, if this is one.
        generation_config: from ``generation_config.json``, or None where there is none.
        part: which of several models this is. Its weights go by their names in the part, and no
            others are seen.
    """

    path: Path
    config: PreTrainedConfig
    generation_config: GenerationConfig | None
    part: CheckpointPart | None = None

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
        """Open a folder, or a model of the Hugging Face hub (downloaded to its usual cache).

        Args:
            model: folder or hub id (``organisation/name``).
            part: which model, if it holds several.
            revision: branch, tag or commit on the hub.
            trust_remote_code: whether the config may come with its own Python code.
            parts_of: the models that a folder with such a ``config.json`` holds; none if it is
                one. It may first teach transformers the config's type.

        Raises:
            ValueError: there is no such folder or hub model, it cannot be fetched, it has no
                ``config.json`` that transformers understands, or no such part.
        """
        path = _locate(str(model), revision, trust_remote_code)
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} is no checkpoint: it has no config.json")
        try:
            with quiet_config_log():
                parts = parts_of(PreTrainedConfig.get_config_dict(path)[0])
                config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path / 'config.json'} cannot be used: {error}") from error
        found = find_part(parts, part, path)
        has_generation = (path / "generation_config.json").is_file()
        if found is not None:
            config = getattr(config, found.config_name)
            has_generation = has_generation and found.has_generation_config
        generation_config = GenerationConfig.from_pretrained(path) if has_generation else None
        return cls(path, config, generation_config, found)

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
            raise ValueError(f"{self.path / 'config.json'} states no architectures")
        return str(architectures[0])

    @cached_property
    def weight_files(self) -> Mapping[str, str]:
        """Tensor name to the file that holds it; reads headers only.

        Raises:
            ValueError: there are no safetensors weights, or the index is malformed.
        """
        prefix = self._prefix
        return {
            name.removeprefix(prefix): file
            for name, file in self._whole_files.items()
            if name.startswith(prefix)
        }

    @property
    def _prefix(self) -> str:
        return "" if self.part is None else self.part.prefix

    @cached_property
    def _whole_files(self) -> Mapping[str, str]:
        index = self.path / _INDEX_FILE
        if index.is_file():
            return _read_index(index)
        if not (self.path / _SINGLE_FILE).is_file():
            raise ValueError(_no_weights_message(self.path))
        with _open_safetensors(self.path / _SINGLE_FILE) as file:
            return dict.fromkeys(file.keys(), _SINGLE_FILE)

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one by one, on the CPU, in the type they are stored in.

        Args:
            names: which; all by default.

        Raises:
            ValueError: a name that is not there, or a file that is missing or damaged.
        """
        wanted = self.weight_files.keys() if names is None else names
        self._require(wanted)
        by_file: dict[str, list[str]] = {}
        for name in wanted:
            by_file.setdefault(self.weight_files[name], []).append(name)
        for file_name, members in by_file.items():
            with _open_safetensors(self.path / file_name) as file:
                for name in members:
                    yield name, file.get_tensor(self._prefix + name)

    def rows_of_whole(self, name: str, indices: Sequence[int]) -> Tensor:
        """Read single rows of a matrix, which may be another part's, and nothing else of it.

        Args:
            name: in the whole checkpoint, its part's prefix included.
            indices: of the rows.

        Returns:
            ``(len(indices), width)`` on the CPU, in the type it is stored in.

        Raises:
            ValueError: there is no such matrix, or it has no such row.
        """
        if name not in self._whole_files:
            raise ValueError(f"{self.path} lacks the weights {name}")
        with _open_safetensors(self.path / self._whole_files[name]) as file:
            matrix = file.get_slice(name)
            num_rows = matrix.get_shape()[0]
            wrong = [index for index in indices if not 0 <= index < num_rows]
            if wrong:
                raise ValueError(f"{name} has rows 0 to {num_rows - 1}, asked for {wrong}")
            return torch.cat([matrix[index : index + 1] for index in indices])

    def load_into(
        self, targets: Mapping[str, Tensor], *, ignored: Collection[str] = frozenset()
    ) -> None:
        """Copy every tensor to its place, converting type and device on the way.

        At any time at most one tensor of the checkpoint is in memory beside the targets.

        Args:
            targets: tensor name to the tensor (or slice) that receives it.
            ignored: names that may be in the checkpoint without having a place.

        Raises:
            ValueError: tensors are missing, have no place, or differ in shape.
        """
        self._require(targets)
        unexpected = [
            name
            for name in self.weight_files
            if name not in targets and name not in ignored and not name.endswith(_COMPUTED)
        ]
        if unexpected:
            raise ValueError(
                f"{self.path} holds weights that {self.architecture} has no place for: "
                + _listed(unexpected)
            )
        for name, tensor in self.weights(targets):
            target = targets[name]
            if tensor.shape != target.shape:
                raise ValueError(
                    f"{name} in {self.path} has shape {tuple(tensor.shape)}; "
                    f"its config asks for {tuple(target.shape)}"
                )
            target.copy_(tensor)

    def _require(self, names: Collection[str]) -> None:
        missing = [name for name in names if name not in self.weight_files]
        if missing:
            raise ValueError(f"{self.path} lacks the weights {_listed(missing)}")


def _locate(model: str, revision: str | None, trust_remote_code: bool) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"model {model!r} is a file; a checkpoint is a folder with a config.json")
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


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (KeyError, AttributeError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{index} is no index of shards: {error!r}") from error
    missing = sorted({file for file in files.values() if not (index.parent / file).is_file()})
    if missing:
        raise ValueError(f"{index} names shards that are not there: {_listed(missing)}")
    return files


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error


def _no_weights_message(path: Path) -> str:
    pickled = sorted(f.name for f in path.iterdir() if f.suffix in _PICKLED_SUFFIXES)
    message = f"{path} has neither {_SINGLE_FILE} nor {_INDEX_FILE}"
    if pickled:
        message += f"; its weights are pickled ({_listed(pickled)}), convert them to safetensors"
    return message


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    more = len(names) - _LISTED
    return f"{shown} and {more} more" if more > 0 else shown
