"""Finds the files that a request names: in a folder, or somewhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

from engine.media.media_source import regular_file

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FolderFiles", "RequestFiles", "only_embeds"]

MAX_EMBEDS_BYTES = 2**29
"""Largest file of embeddings, which is read whole before its rows are counted."""

_LONGEST_NAME = 200
"""Characters of a file's name that a message repeats."""


class RequestFiles(Protocol):
    """Finds what a request names. Whether its content will do is the engine's to say."""

    def item(self, key: str, name: str) -> str | Path | bytes:
        """An image, a sound or a video; ``ValueError``: there is no such file."""

    def at_url(self, key: str, url: str) -> str | Path | bytes:
        """Find what a part of a message brings under a key; ``ValueError`` if it cannot be had."""

    def embeds(self, name: str) -> Tensor:
        """A tensor ``(tokens, hidden)``; ``ValueError`` if it cannot be had."""


class FolderFiles:
    """Names are paths, from a folder on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def item(self, key: str, name: str) -> str | Path:
        """A data URL as it is, or the file of that name; see :class:`RequestFiles`."""
        return name if name[:5].lower() == "data:" else self._file(key, name)

    def _file(self, key: str, name: str) -> Path:
        file = self._folder / name
        return regular_file(file, f"{key}: {_shown(str(file))}")

    def at_url(self, key: str, url: str) -> str | Path:
        """A data URL as it is, or the file that is meant."""
        scheme = url[:8].lower()
        if scheme.startswith(("http://", "https://")):
            raise ValueError(
                f"{key}: {_shown(url)} is in the network, and nothing is fetched from there; "
                "save it, and give the file"
            )
        if scheme.startswith("file:"):
            url = url2pathname(urlsplit(url).path)
        return self.item(key, url)

    def embeds(self, name: str) -> Tensor:
        """Load the one tensor of a file; its width is the engine's to check."""
        from safetensors import SafetensorError  # only here: few requests wait for torch
        from safetensors.torch import load_file

        file = self._file("prompt_embeds", name)
        where = f"prompt_embeds: {_shown(str(file))}"
        try:
            num_bytes = Path(file).stat().st_size
            if num_bytes > MAX_EMBEDS_BYTES:
                raise ValueError(
                    f"it has {num_bytes:,} bytes, of at most {MAX_EMBEDS_BYTES:,}; give larger "
                    "embeddings in Python, as EmbedsPrompt(tensor)"
                )
            tensors = load_file(file)
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"{where} cannot be read: {error}") from error
        return only_embeds(tensors, where)


def only_embeds(tensors: Mapping[str, Tensor], where: str) -> Tensor:
    """The one tensor of a file.

    Raises:
        ValueError: there are several, or it is not ``(tokens, hidden)`` floating point.
    """
    if len(tensors) != 1:
        raise ValueError(
            f"{where} must hold one tensor, got {len(tensors)}: {', '.join(sorted(tensors))}"
        )
    (embeds,) = tensors.values()
    if embeds.ndim != 2 or not embeds.shape[0] or not embeds.is_floating_point():
        raise ValueError(
            f"{where} must hold a floating-point tensor (tokens, hidden), got "
            f"{str(embeds.dtype).removeprefix('torch.')} {tuple(embeds.shape)}"
        )
    return embeds


def _shown(name: str) -> str:
    return repr(name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "...")
