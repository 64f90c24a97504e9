"""The voices that a speaking checkpoint brings."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["SPEAKERS_FILE", "Speaker", "Speakers", "load_speakers"]

SPEAKERS_FILE = "spk_dict.pt"
"""Where a checkpoint of the Qwen Omni family keeps its voices. Not pickled code: it is read with
``weights_only=True``, which builds tensors and plain containers and refuses everything else."""

_MOST_BYTES = 2**26
# What the family itself falls back to (``generate(speaker="Chelsie")`` in transformers).
_PREFERRED = "Chelsie"


@dataclass(frozen=True, slots=True, eq=False)
class Speaker:
    """One voice.

    Attributes:
        name: as users ask for it.
        bos_token: text token whose embedding opens a reply in this voice.
        conditioning: ``(1, D)`` float32 embedding of the voice.
        reference_mel: ``(1, T, mel_dim)`` float32 spectrogram of a sample of it.
    """

    name: str
    bos_token: int
    conditioning: Tensor
    reference_mel: Tensor


class Speakers:
    """The voices of one checkpoint.

    Args:
        speakers: at least one; names are unique.
    """

    def __init__(self, speakers: tuple[Speaker, ...]) -> None:
        self._by_name = {speaker.name: speaker for speaker in speakers}

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the file."""
        return tuple(self._by_name)

    @property
    def default(self) -> Speaker:
        """The voice where none was chosen: Chelsie if she is there, else the first."""
        return self._by_name.get(_PREFERRED) or next(iter(self._by_name.values()))

    def get(self, name: str | None) -> Speaker:
        """One voice; None takes the default.

        Raises:
            ValueError: no voice has this name; says which there are.
        """
        if name is None:
            return self.default
        if not isinstance(name, str):
            raise ValueError(f"a speaker is chosen by name, got {type(name).__name__}")
        if name not in self._by_name:
            close = get_close_matches(name, self.names, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(
                f"unknown speaker {name!r}{hint}; this checkpoint has {', '.join(self.names)}"
            )
        return self._by_name[name]


def load_speakers(path: Path) -> Speakers:
    """Read ``{name: {"bos_token": int, "cond": (1, D), "ref_mel": (1, T, mel_dim)}}``.

    Args:
        path: a checkpoint's folder, or its ``spk_dict.pt``.

    Raises:
        ValueError: the file is not there, cannot be read, or holds something else.
    """
    file = path / SPEAKERS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} is missing: the checkpoint brings no voices, so it cannot speak")
    try:
        _check_archive(file)
        # Mapped, so that no tensor can lie outside of the file, whatever it says of itself.
        content = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # Damaged files raise whatever the archive, the unpickler or torch stumbled over.
        raise ValueError(f"{file} cannot be read as a dictionary of speakers: {error}") from error
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{file} must map names to speakers, it holds a {type(content).__name__}")
    return Speakers(tuple(_speaker(file, name, entry) for name, entry in content.items()))


def _check_archive(file: Path) -> None:
    """Archives that ``torch.save`` writes are not compressed: one that is may be of any size."""
    size = file.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(f"it has {size} bytes; voices have at most {_MOST_BYTES}")
    with zipfile.ZipFile(file) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed")


def _speaker(file: Path, name: object, entry: Any) -> Speaker:
    where = f"speaker {name!r} of {file}"
    wanted = {"bos_token", "cond", "ref_mel"}
    if not isinstance(name, str) or not isinstance(entry, Mapping) or not wanted <= entry.keys():
        raise ValueError(f"{where} must have a name and {', '.join(sorted(wanted))}")
    bos_token = entry["bos_token"]
    if not isinstance(bos_token, int) or isinstance(bos_token, bool) or bos_token < 0:
        raise ValueError(f"{where}: bos_token must be a token id, got {bos_token!r}")
    return Speaker(
        name=name,
        bos_token=bos_token,
        conditioning=_rows(f"{where}: cond", entry["cond"], 2),
        reference_mel=_rows(f"{where}: ref_mel", entry["ref_mel"], 3),
    )


def _rows(where: str, value: object, num_dims: int) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim != num_dims or len(value) != 1:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{where} must be a tensor of {num_dims} dimensions, 1 first, got {got}")
    if value.layout != torch.strided or value.is_meta or not value.is_floating_point():
        raise ValueError(f"{where} must hold plain floating-point numbers")
    # A few bytes can be spread over any shape, for which there is no memory.
    if value.nbytes > value.untyped_storage().nbytes():
        raise ValueError(f"{where} has the shape {tuple(value.shape)}, but not as many numbers")
    if not value.numel() or not value.isfinite().all():
        raise ValueError(f"{where} must hold finite numbers")
    return value.to(torch.float32, copy=True)
