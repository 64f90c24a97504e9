"""Reader of untrusted JSON files: bounded size, no duplicate keys, no NaN."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any


def file_inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, given a name from an untrusted source.

    Links may point to other files of the folder. In a cache of the Hugging Face hub they may also
    point to its blobs::

        models--organisation--name/snapshots/<commit>/model.safetensors
        models--organisation--name/blobs/                                   of this model
        blobs/                                                              of all models

    Raises:
        ValueError: the name or a link points outside the folder, or there is no such file.
    """
    for pure in (PurePosixPath(name), PureWindowsPath(name)):
        if pure.anchor or ".." in pure.parts or "\0" in name:
            raise ValueError(f"{name!r} lies outside of {folder}")
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path} is not there, or is no file")
    real = path.resolve()
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise ValueError(f"{path} is a link to {real}, which lies outside of the folder")
    return path


def _roots(folder: Path) -> Iterator[Path]:
    yield folder.resolve()
    for path in (folder.absolute(), folder.resolve()):
        if path.parent.name == "snapshots" and "--" in path.parents[1].name:
            yield path.parents[1].resolve() / "blobs"
            yield path.parents[2].resolve() / "blobs"


_MIB = 2**20
_MAX_BYTES = 64 * _MIB


def read_json_object(file: Path, *, most_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """Read a JSON file whose outermost value is an object; see :func:`read_json`.

    Raises:
        ValueError: it is no valid JSON, or not an object; names the file.
    """
    content = read_json(file, most_bytes=most_bytes)
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def read_json(file: Path, *, most_bytes: int = _MAX_BYTES) -> Any:
    """Read a JSON file.

    Infinity is accepted, as some published configs use it as a limit; NaN is not.

    Raises:
        ValueError: it is no regular file, too large, no UTF-8, no JSON, nested too deeply, has a
            duplicate key, or contains NaN; names the file.
    """
    if not file.is_file():
        raise ValueError(f"{file} is no regular file")
    size = file.stat().st_size
    if size > most_bytes:
        raise ValueError(f"{file} has {size} bytes; a file of its kind has at most {most_bytes}")
    try:
        text = file.read_bytes().decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ValueError(f"{file} is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{file} is no valid JSON: {error}") from error


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r} is there twice")
        content[key] = value
    return content


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is no number")
    return float(name)
