"""Resumable training of one module, with a learning-rate schedule."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from training.spoken_sums.workers import Workers

_SAVE_EVERY = 60.0
_REPORT_EVERY = 20.0
_WARMUP = 0.03


class ModuleTraining:
    """AdamW with a learning rate that warms up and then decays to zero.

    Args:
        module: the trained module; saved with the optimizer, so that a run can resume.
        file: path of the saved state.
        steps: total number, of this and earlier runs together.
        rate: peak learning rate.
        betas: of AdamW.
        weight_decay: of AdamW.
    """

    def __init__(
        self,
        module: nn.Module,
        file: Path,
        steps: int,
        rate: float,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.01,
    ) -> None:
        self.workers = Workers()
        self.module, self.file, self.steps, self.rate = module, file, steps, rate
        self.optimizer = torch.optim.AdamW(
            module.parameters(), rate, betas=betas, weight_decay=weight_decay
        )
        self.spent, self.step = 0.0, 0
        if file.is_file():
            state = torch.load(file, weights_only=True)
            module.load_state_dict(state["module"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.spent, self.step = state["spent"], state["step"]

    def run(self, loss_of: Callable[[int], tuple[Tensor, dict[str, float]]]) -> None:
        """Train until all steps are done.

        Args:
            loss_of: maps a batch number, which differs between workers, to a loss and figures to
                report.
        """
        sums: dict[str, float] = {}
        last, saved, reported, count = time.monotonic(), self.spent, self.spent, 0
        while self.step < self.steps:
            loss, figures = loss_of(self.step * self.workers.count + self.workers.rank)
            loss.backward()
            self.workers.average(self.module.parameters())
            nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * self._schedule()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step, count = self.step + 1, count + 1
            now = time.monotonic()
            self.spent, last = self.spent + now - last, now
            for name, value in {"loss": loss.item(), **figures}.items():
                sums[name] = sums.get(name, 0.0) + value
            if self.workers.rank == 0 and self.spent - reported > _REPORT_EVERY:
                means = " ".join(f"{name} {total / count:.4f}" for name, total in sums.items())
                print(f"{self.file.stem} {self.spent:.0f}s step {self.step} {means}", flush=True)
                sums, reported, count = {}, self.spent, 0
            if self.spent - saved > _SAVE_EVERY:
                self.save()
                saved = self.spent
        self.save()

    def save(self) -> None:
        """Save module, optimizer and clock atomically."""
        if self.workers.rank:
            return
        state = {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "spent": self.spent,
            "step": self.step,
        }
        torch.save(state, self.file.with_suffix(".tmp"))
        self.file.with_suffix(".tmp").replace(self.file)

    def _schedule(self) -> float:
        part = self.step / self.steps
        return min(part / _WARMUP + 0.05, 1.0 - part, 1.0)
