"""One step of a training by the clock."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from training.spoken_sums.wall_clock import TrainingRun
from training.spoken_sums.workers import Workers


@pytest.mark.parametrize(
    ("step", "elapsed_s", "rate"),
    [(0, 0.0, 0.2 / 4), (3, 0.0, 0.2), (9, 5.0, 0.2 * 0.5), (9, 9.99, 0.2 * 0.02)],
    ids=["the first", "the last of the warm-up", "half the time", "near the end"],
)
def test_a_step_follows_the_clipped_gradient_at_the_rate_of_its_time(
    tmp_path: Path, step: int, elapsed_s: float, rate: float
) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=123.0)
    run = TrainingRun(tmp_path / "state.pt", 10.0, weight=nn.ParameterList([weight]))
    run.num_steps, run.elapsed_s = step, elapsed_s
    weight.grad = torch.tensor([30.0, -40.0])
    run.update(optimizer, [weight], Workers(), 0.2, warmup=4)
    torch.testing.assert_close(weight.detach(), rate * torch.tensor([-0.6, 0.8]))
