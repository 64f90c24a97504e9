"""The codec: a code is the nearest of 1023 patches of two frames, 50 codes a second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from training.spoken_sums.mel import NUM_BANDS
from training.spoken_sums.mouth_sizes import NUM_CODES

FRAMES_PER_CODE = 2
_ROUNDS = 25
_PIECE = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Codebook:
    """The patches of codes 1 to 1023. Code 0 is unused: the flow interprets it as "no code".

    Attributes:
        patches: ``(1023, 160)`` float32, two frames each.
    """

    patches: Tensor

    def encode(self, mel: Tensor) -> Tensor:
        """Return codes ``(frames / 2,)`` int64 of a spectrogram ``(frames, 80)``."""
        return _nearest(mel.reshape(-1, FRAMES_PER_CODE * NUM_BANDS), self.patches) + 1

    def similar(self, count: int) -> Tensor:
        """Return the nearest other codes of each code, ``(1024, count)`` int64; 0 for code 0."""
        distances = torch.cdist(self.patches, self.patches).fill_diagonal_(torch.inf)
        nearest = distances.topk(count, largest=False).indices + 1
        return torch.cat([nearest.new_zeros(1, count), nearest])

    def decode(self, codes: Tensor) -> Tensor:
        """Return the spectrogram ``(frames, 80)`` of the codes' patches."""
        return self.patches[codes - 1].reshape(-1, NUM_BANDS)


def learn_codebook(mels: list[Tensor], file: Path, seed: int = 0) -> Codebook:
    """Run k-means over spectrograms ``(frames, 80)``, or load the result of an earlier run."""
    if file.is_file():
        return Codebook(torch.load(file, weights_only=True))
    rows = torch.cat([mel.reshape(-1, FRAMES_PER_CODE * NUM_BANDS) for mel in mels])
    generator = torch.Generator().manual_seed(seed)
    patches = rows[torch.randperm(len(rows), generator=generator)[: NUM_CODES - 1]].clone()
    for _ in range(_ROUNDS):
        nearest = _nearest(rows, patches)
        counts = torch.bincount(nearest, minlength=len(patches))
        sums = torch.zeros_like(patches).index_add_(0, nearest, rows)
        # An empty patch restarts from a random row.
        drawn = torch.randint(len(rows), (len(patches),), generator=generator)
        means = sums / counts.clamp_min(1)[:, None]
        patches = torch.where(counts[:, None] > 0, means, rows[drawn])
    torch.save(patches, file)
    return Codebook(patches)


def _nearest(rows: Tensor, patches: Tensor) -> Tensor:
    squares = patches.square().sum(1)
    return torch.cat([(squares - 2 * part @ patches.T).argmin(1) for part in rows.split(_PIECE)])
