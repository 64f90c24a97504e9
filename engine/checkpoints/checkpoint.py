"""Hugging Face checkpoints: the config, and the weights one tensor at a time.

A checkpoint may contain several models (parts), each of which runs in a separate stage::

    config.json              weights
    first_config             first.layers.0...       one part
    second_config            second.layers.0...      another
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from engine.checkpoints.config_file import (
    CONFIG_FILE,
    check_files,
    load_config,
    load_generation_config,
    read_config_file,
)
from engine.checkpoints.gguf_checkpoint import GGUFWeights, gguf_config, gguf_token_ids
from engine.checkpoints.packed_files import PackedFiles, PackedFormat
from engine.checkpoints.quantized_weight import QuantizationScheme, QuantizedWeight, Target
from engine.checkpoints.weight_files import WeightFiles, listed
from engine.files.gguf_header import GGUFHeader, find_gguf, read_gguf_header
from engine.interface.placed_error import described, suggest


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One model of several in a checkpoint.

    Attributes:
        name: name by which users select it.
        whole: ``model_type`` of the whole config.
        config_name: attribute of its config in the whole config; empty if it is the whole config.
        prefix: prefix of its weights' names.
        architecture: transformers' class for it; published configs name older ones.
        has_generation_config: True if ``generation_config.json`` belongs to this part.
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
    """Find the part that a user selected; None for one model without parts."""
    by_name = {part.name: part for part in parts}
    if not by_name:
        if name is not None:
            raise ValueError(f"{path} is one model without parts; got part={name!r}, leave it out")
        return None
    if name is None:
        raise ValueError(f"{path} holds several models; say by part which: {', '.join(by_name)}")
    if name not in by_name:
        raise ValueError(f"{path} has no part {name!r}{suggest(name, by_name)}")
    return by_name[name]


ENTRY_POINTS = "omni_pipeline.model_sources"
"""Entry point group of packages that provide model sources. The name of an entry is the prefix
before the colon; its object is a function that maps the whole reference to a folder."""

# At least two characters before the colon, unlike a drive letter.
_REFERENCE = re.compile(r"([A-Za-z][\w+-]+):.*", re.DOTALL)


def folder_of_source(model: str) -> Path | None:
    """Get the folder of a ``source:name`` model from the source's package, which may build it.

    Returns:
        The folder; None for names of another form, such as hub ids.

    Raises:
        ValueError: no installed package provides the source, or it has no such model.
    """
    match = _REFERENCE.fullmatch(model)
    if match is None:
        return None
    source = match[1]
    for entry_point in entry_points(group=ENTRY_POINTS, name=source):
        try:
            locate = entry_point.load()
        except Exception as error:  # a package may raise anything; report it for this model
            raise ValueError(
                f"model {model!r}: {entry_point.value!r} cannot be loaded: {described(error)}"
            ) from error
        return Path(locate(model))
    known = sorted(f"{name}:" for name in entry_points(group=ENTRY_POINTS).names)
    raise ValueError(
        f"model {model!r}: no installed package brings models named {source}:...; known are "
        f"{', '.join(known) or 'none'}. After an update of an editable install: pip install -e ."
    )


# Weights in the Hugging Face layout, configs, tokenizers and chat templates. No pickles except a
# speech model's voices, from which only tensors and numbers are read.
_FILE_PATTERNS = ["model*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "spk_dict.pt"]
# Dense layers after the pooling of an embedding model.
_FILE_PATTERNS += ["*_Dense/model.safetensors"]


@dataclass(frozen=True)
class Checkpoint:
    """A model folder, one of several models in it, or a GGUF file.

    Attributes:
        path: the folder, or the file.
        config: the transformers config, or that of the part.
        generation_config: from ``generation_config.json``; None if there is none.
        part: the selected one of several models. Only its weights are visible, without the prefix.
        trust_remote_code: True if processors may run Python code from the checkpoint.
        gguf: header of a GGUF file; None for a folder.
        packed: format of quantized safetensors weights; None if those of the part are plain.
        is_outline: True if models are built from its config only, on ``meta``.
    """

    path: Path
    config: PreTrainedConfig
    generation_config: GenerationConfig | None
    part: CheckpointPart | None = None
    trust_remote_code: bool = False
    gguf: GGUFHeader | None = None
    packed: PackedFormat | None = None
    is_outline: bool = False

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
        """Open a folder, a GGUF file, or a model of the Hugging Face hub (cached on download).

        Args:
            model: folder, file or folder with a GGUF file, hub id (``organisation/name``), or a
                name that a package provides, such as ``seeded:<name>``.
            revision: branch, tag or commit on the hub.
            trust_remote_code: if true, the config may run Python code from the checkpoint.
            parts_of: returns the parts of a folder with the given ``config.json``; none if it is
                one model. May first register the config's type with transformers.

        Raises:
            ValueError: there is no such folder or hub model, it cannot be fetched, it has no
                ``config.json`` that transformers supports, or no such part; a file is stored
                elsewhere, or a config has an invalid value. Names file and key.
        """
        path = locate(str(model), revision, trust_remote_code)
        if (file := find_gguf(path)) is not None:
            find_part((), part, file)
            header = read_gguf_header(file)
            generation = GenerationConfig(**gguf_token_ids(header))
            return cls(file, gguf_config(header), generation, gguf=header)
        check_files(path, _FILE_PATTERNS)
        content = read_config_file(path)
        packed = PackedFormat.of(path / CONFIG_FILE, content)
        parts = parts_of(content)
        config = load_config(path, trust_remote_code=trust_remote_code)
        found = find_part(parts, part, path)
        generation_config = load_generation_config(path)
        if found is not None:
            config = getattr(config, found.config_name) if found.config_name else config
            generation_config = generation_config if found.has_generation_config else None
            packed = packed and packed.used_by(path, found.prefix)
        return cls(path, config, generation_config, found, trust_remote_code, packed=packed)

    @property
    def config_file(self) -> Path:
        """The file that the config was read from."""
        return self.path / CONFIG_FILE if self.gguf is None else self.path

    @property
    def stored(self) -> str | None:
        """Description of the format of quantized weights; None for plain weights."""
        if self.gguf is None:
            return None if self.packed is None else str(self.packed)
        counts = (f"{count} {kind}" for kind, count in GGUFWeights(self.gguf).formats.items())
        return f"GGUF, tensors of {', '.join(counts)}"

    def scheme_of(self, name: str) -> QuantizationScheme | None:
        """Return the storage scheme of a matrix from header or config; None for plain weights."""
        if isinstance(self._all_weights, GGUFWeights):
            return self._all_weights.scheme_of(name)
        packed = self.packed if ".layers." in name else None  # other weights are published plain
        return None if packed is None else QuantizationScheme(packed.bits, packed.group_size)

    def require_plain(self) -> None:
        """Raise ``ValueError`` unless this is a folder of plain weights."""
        if self.stored is not None:
            key = "" if self.packed is None else "quantization_config: "
            raise ValueError(
                f"{self.config_file}: {key}weights are stored as {self.stored}; only decoders "
                "take that: name a checkpoint of plain weights"
            )

    @property
    def architecture(self) -> str:
        """Class name from the part or the config; ``ValueError`` if there is none."""
        if self.part is not None:
            return self.part.architecture
        architectures = getattr(self.config, "architectures", None)
        if not architectures:
            raise ValueError(f"{self.config_file} states no architectures")
        return str(architectures[0])

    @property
    def whole_config(self) -> PreTrainedConfig:
        """The config of the folder, even if this is one of several models in it."""
        if self.part is None:
            return self.config
        return load_config(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def weight_files(self) -> Mapping[str, str]:
        """File of each tensor; reads headers only, and raises like :attr:`WeightFiles.stored`."""
        prefix, files = self._prefix, {} if self.is_outline else self._all_weights.files
        return {
            name.removeprefix(prefix): file
            for name, file in files.items()
            if name.startswith(prefix)
        }

    @property
    def _prefix(self) -> str:
        return "" if self.part is None else self.part.prefix

    @cached_property
    def _all_weights(self) -> WeightFiles | GGUFWeights:
        if self.gguf is not None:
            return GGUFWeights(self.gguf)
        packed = self.packed
        return WeightFiles(self.path) if packed is None else PackedFiles(self.path, format=packed)

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one by one, on the CPU, in their stored type; dequantizes quantized ones.

        Args:
            names: names of the tensors; all by default.

        Raises:
            ValueError: a tensor does not exist, or a file is missing or damaged.
        """
        prefix = self._prefix
        selected = self.weight_files.keys() if names is None else names
        for name, stored in self._all_weights.tensors([f"{prefix}{name}" for name in selected]):
            plain = stored.dequantize() if isinstance(stored, QuantizedWeight) else stored
            yield name.removeprefix(prefix), plain

    def unplaced(self, targets: Collection[str]) -> list[str]:
        """Return the names of the stored tensors that are not among the targets."""
        return [name for name in self.weight_files if name not in targets]

    def check_weights(
        self, targets: Mapping[str, Target], *, ignored: Collection[str] = frozenset()
    ) -> None:
        """Compare the stored tensors with their targets, reading headers only.

        Args:
            targets: target of each tensor by name; may be on ``meta``.
            ignored: names that may be in the checkpoint without a target.

        Raises:
            ValueError: tensors are missing, have no target, or differ in shape; or a tensor for a
                floating-point target is not floating point.
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
        self._all_weights.check({f"{prefix}{name}": tensor for name, tensor in targets.items()})

    def load_into(
        self, targets: Mapping[str, Target], *, ignored: Collection[str] = frozenset()
    ) -> None:
        """Copy every tensor to its target, converting dtype and device.

        At any time at most one tensor of the checkpoint is in memory in addition to the targets.
        Arguments and errors are those of :meth:`check_weights`; nothing is copied if it raises.
        """
        self.check_weights(targets, ignored=ignored)
        prefix = self._prefix
        for name, stored in self._all_weights.tensors([f"{prefix}{name}" for name in targets]):
            target = targets[name.removeprefix(prefix)]
            if isinstance(stored, QuantizedWeight) and isinstance(target, Tensor):
                stored = stored.dequantize()
            target.copy_(stored)  # type: ignore[arg-type]


def locate(
    model: str, revision: str | None, trust_remote_code: bool = False, *, configs_only: bool = False
) -> Path:
    """Locate the folder or file of a model, fetched from the hub if needed; see ``Checkpoint``."""
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
    patterns = [*(["*.json"] if configs_only else _FILE_PATTERNS), *(["*.py"] * trust_remote_code)]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(
            f"model {model!r} is no folder here, and it could not be fetched from the "
            f"Hugging Face hub: {error}"
        ) from error
