"""Progress and saved state of a part's training."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.spoken_sums.workers import Workers

_SAVE_EVERY_S = 60.0


class TrainingRun:
    """A resumable training of one part, saved periodically.

    Args:
        path: file of the saved state.
        steps: total number over all calls.
        state: trained objects with a ``state_dict``, by name.

    Attributes:
        num_steps: number of steps done.
        elapsed_s: seconds that they took.
        saves: true if this process writes the state.
    """

    def __init__(self, path: Path, steps: int, **state: Any) -> None:
        self._path, self._steps, self._state = path, steps, state
        self.num_steps, self.elapsed_s = 0, 0.0
        self.saves = True
        if path.exists():
            saved = torch.load(path, weights_only=True)
            self.num_steps, self.elapsed_s = saved["num_steps"], saved["elapsed_s"]
            for name, item in state.items():
                item.load_state_dict(saved[name])

    @property
    def progress(self) -> float:
        """Share of the steps done, from 0 to 1."""
        return min(1.0, self.num_steps / self._steps) if self._steps else 1.0

    def steps(self) -> Iterator[float]:
        """Yield the progress before each step; save every minute and at the end."""
        last_saved = before = time.monotonic()
        while self.progress < 1.0:
            yield self.progress
            now = time.monotonic()
            self.num_steps += 1
            self.elapsed_s += now - before
            before = now
            if now - last_saved > _SAVE_EVERY_S:
                self.save()
                last_saved = now
        self.save()

    def save(self) -> None:
        """Write all state atomically, unless ``saves`` is False."""
        if not self.saves:
            return
        saved = {name: item.state_dict() for name, item in self._state.items()}
        saved |= {"num_steps": self.num_steps, "elapsed_s": self.elapsed_s}
        partial = self._path.with_suffix(".partial")
        torch.save(saved, partial)
        partial.rename(self._path)

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        workers: Workers,
        peak: float,
        *,
        warmup: int = 100,
    ) -> None:
        """Take an optimizer step along the mean gradient of all workers.

        Args:
            optimizer: of the parameters.
            parameters: with gradients, clipped to a total norm of 1.
            workers: the processes that train the same model.
            peak: peak learning rate.
            warmup: steps until the peak; from then on the rate decays linearly to a fiftieth.
        """
        workers.average(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        rate = peak * min(1.0, (self.num_steps + 1) / warmup) * max(0.02, 1.0 - self.progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
