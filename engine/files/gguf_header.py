"""Reader of untrusted GGUF headers: metadata, and locations of tensors.

The ``gguf`` package provides types and dequantizes blocks. Its reader allocates whatever memory a
header requests, so headers are read here: every count, length and offset is compared with the file
size and with the limits of published files before it is used.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Published headers have some 50 entries, a few thousand tensors and 16 MiB of vocabulary.
_MAX_ENTRIES, _MAX_TENSORS, _MAX_HEADER_BYTES = 2**12, 2**16, 2**26
_MAX_NAME_BYTES, _MAX_STRING_BYTES, _MAX_ITEMS = 2**10, 2**22, 2**22
_MAX_DIMENSIONS, _ALIGNMENTS = 4, (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Longer arrays, such as a vocabulary's scores, are represented by their lengths.
_MAX_KEPT_ITEMS = 2**10
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Location and type of a tensor.

    Attributes:
        shape: outermost dimension first, as in torch.
        type_name: type of its values or blocks, such as ``Q4_K``.
        block_size: number of values in a block; 1 if the type is not quantized.
        start: offset of its bytes in the file.
    """

    shape: tuple[int, ...]
    type_name: str
    block_size: int
    start: int
    nbytes: int

    def rows(self) -> Iterator[GGUFTensor]:
        """Yield the tensors that this one stacks along its first dimension."""
        nbytes = self.nbytes // self.shape[0]
        for index in range(self.shape[0]):
            start = self.start + index * nbytes
            yield replace(self, shape=self.shape[1:], start=start, nbytes=nbytes)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Header of a GGUF file.

    Attributes:
        metadata: values by key; for arrays of strings and long arrays, only the length.
        tensors: tensors by name, in file order.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """Model architecture, by its GGUF name; ``ValueError`` if it is missing."""
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ValueError(f"{self.path}: general.architecture is {architecture!r}, no name")
        return architecture


def find_gguf(model: Path) -> Path | None:
    """Return a GGUF file, or that of a folder without safetensors, or None; raise for several."""
    if model.is_file():
        return model if model.suffix == ".gguf" else None
    if not model.is_dir() or any(model.glob("*.safetensors")):
        return None
    files = sorted(file for file in model.glob("*.gguf") if file.is_file())
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise ValueError(f"{model} holds several GGUF files ({names}): name one of them as model")
    return files[0] if files else None


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file, without reading tensor data.

    Raises:
        ValueError: it is no GGUF file, truncated, damaged, or has invalid values; names the file
            and the problem.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise ValueError("it is cut off: a header alone takes 24 bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(content).header(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no GGUF file that can be used: {error}") from error


class _Reader:
    """Sequential reader of a header; raises ``ValueError`` on invalid content."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._offset = content, 0

    def header(self, path: Path) -> GGUFHeader:
        magic = self._read(4, "the magic bytes")
        if magic != _MAGIC:
            raise ValueError(f"it must begin with {_MAGIC!r}, got {magic!r}")
        (version,) = self._numbers("I", "the version")
        if version not in _VERSIONS:
            hint = ": it is big-endian" if version & 0xFFFF == 0 else ""
            raise ValueError(f"its version must be 2 or 3, got {version}{hint}")
        num_tensors, num_entries = self._numbers("QQ", "the counts")
        _check_at_most("the number of tensors", num_tensors, _MAX_TENSORS)
        _check_at_most("the number of metadata entries", num_entries, _MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string("a metadata key", _MAX_NAME_BYTES)
            if key in metadata:
                raise ValueError(f"the key {key!r} is there twice")
            (kind,) = self._numbers("I", key)
            metadata[key] = self._value(key, kind)
        if metadata.get("split.count", 0) not in (0, 1):
            raise ValueError(f"it is one of {metadata['split.count']} parts; join them first")
        infos = self._tensor_infos(num_tensors)
        alignment = metadata.get("general.alignment", 32)
        if alignment not in _ALIGNMENTS:
            raise ValueError(f"general.alignment must be one of {_ALIGNMENTS}, got {alignment!r}")
        start = -(-self._offset // alignment) * alignment
        tensors = {}
        for name, (shape, number, offset) in infos.items():
            if offset % alignment:
                raise ValueError(f"{name} lies at {offset}, no multiple of {alignment}")
            tensors[name] = self._tensor(name, shape, number, start + offset)
        return GGUFHeader(path, metadata, tensors)

    def _tensor_infos(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Read shape, type and offset of each tensor, by name."""
        infos = {}
        for _ in range(count):
            name = self._string("a tensor's name", _MAX_NAME_BYTES)
            if name in infos:
                raise ValueError(f"the tensor {name!r} is there twice")
            (num_dimensions,) = self._numbers("I", name)
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                raise ValueError(f"{name!r} must have 1 to 4 dimensions, got {num_dimensions}")
            shape = self._numbers("Q" * num_dimensions, name)[::-1]
            infos[name] = (shape, *self._numbers("IQ", name))
        return infos

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> GGUFTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"{name} is of the type {number}, which is not known") from None
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block_size:
            raise ValueError(
                f"{name} has shape {shape}; its rows must hold blocks of {block_size} values, "
                f"as {kind.name} has them"
            )
        num_bytes = prod(shape) // block_size * block_bytes
        if start + num_bytes > len(self._content):
            raise ValueError(
                f"{name} of shape {shape} ends at {start + num_bytes}, but the file has "
                f"{len(self._content)} bytes"
            )
        return GGUFTensor(shape, kind.name, block_size, start, num_bytes)

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], key)[0]
        if kind == _STRING:
            return self._string(key, _MAX_STRING_BYTES)
        if kind != _ARRAY:
            raise ValueError(f"{key} is of the type {kind}, which is not known")
        item_kind, count = self._numbers("IQ", key)
        _check_at_most(f"the length of {key}", count, _MAX_ITEMS)
        if item_kind in _SCALARS:
            if count <= _MAX_KEPT_ITEMS:
                return list(self._numbers(_SCALARS[item_kind] * count, key))
            self._read(count * struct.calcsize(_SCALARS[item_kind]), key)
        elif item_kind == _STRING:
            for _ in range(count):
                self._read(self._length(key, _MAX_STRING_BYTES), key)
        else:
            raise ValueError(f"{key} is an array of the type {item_kind}, which is not supported")
        return count

    def _string(self, what: str, limit: int) -> str:
        return self._read(self._length(what, limit), what).decode("utf-8")

    def _length(self, what: str, limit: int) -> int:
        (length,) = self._numbers("Q", what)
        _check_at_most(f"the length of {what}", length, limit)
        return int(length)

    def _numbers(self, formats: str, what: str) -> tuple[Any, ...]:
        packed = f"<{formats}"
        return struct.unpack(packed, self._read(struct.calcsize(packed), what))

    def _read(self, length: int, what: str) -> bytes:
        end = self._offset + length
        if end > len(self._content):
            raise ValueError(
                f"it is cut off: {what} ends at {end}, but the file has {len(self._content)} bytes"
            )
        if end > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has more than {_MAX_HEADER_BYTES} bytes")
        data = self._content[self._offset : end]
        self._offset = end
        return data


def _check_at_most(what: str, value: int, limit: int) -> None:
    if value > limit:
        raise ValueError(f"{what} must be at most {limit}, got {value}")
