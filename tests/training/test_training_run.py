"""One step of a training, and how many there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from training.spoken_sums.training_run import TrainingRun
from training.spoken_sums.workers import Workers


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.2 / 4), (3, 0.2 * 0.97), (50, 0.2 * 0.5), (99, 0.2 * 0.02)],
    ids=["the first", "the last of the warm-up", "half of them", "the last"],
)
def test_a_step_follows_the_clipped_gradient_at_its_own_rate(
    tmp_path: Path, step: int, rate: float
) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=123.0)
    run = TrainingRun(tmp_path / "state.pt", 100, weight=nn.ParameterList([weight]))
    run.num_steps = step
    weight.grad = torch.tensor([30.0, -40.0])
    run.update(optimizer, [weight], Workers(), 0.2, warmup=4)
    torch.testing.assert_close(weight.detach(), rate * torch.tensor([-0.6, 0.8]))


@pytest.mark.parametrize("steps", [0, 3])
def test_a_run_makes_its_steps_and_no_more_when_it_is_called_again(
    tmp_path: Path, steps: int
) -> None:
    module = nn.Linear(2, 1)
    run = TrainingRun(tmp_path / "run.pt", steps, module=module)
    assert list(run.steps()) == [pytest.approx(number / 3) for number in range(steps)]
    again = TrainingRun(tmp_path / "run.pt", steps, module=module)
    assert again.num_steps == steps
    assert list(again.steps()) == []
