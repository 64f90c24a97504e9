"""Files of a stranger's folder, and no others: names and links that lead out of it are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

__all__ = ["file_inside"]


def file_inside(folder: Path, name: str) -> Path:
    """A file that a folder, or a file in it, names.

    Links may lead to other files of the folder. In a cache of the Hugging Face hub they may also
    lead to where it keeps the contents::

        models--organisation--name/snapshots/<commit>/model.safetensors
        models--organisation--name/blobs/                                   of this model
        blobs/                                                              of all models

    Args:
        folder: that it has to be in.
        name: relative to the folder.

    Raises:
        ValueError: it names, or is a link to, something outside; or there is no such file.
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
    for place in (folder.absolute(), folder.resolve()):
        if place.parent.name == "snapshots" and "--" in place.parents[1].name:
            yield place.parents[1].resolve() / "blobs"
            yield place.parents[2].resolve() / "blobs"
