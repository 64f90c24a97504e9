"""Activations are transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from engine.checkpoints.config_file import activation_of, check_activation


@pytest.mark.parametrize("name", ACT2FN)
def test_an_activation_is_transformers(name: str) -> None:
    x = torch.linspace(-9, 9, 999)
    assert torch.equal(activation_of(name)(x), ACT2FN[name](x))


def test_an_unknown_activation_is_told_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"hidden_act must be one of .*quick_gelu.*, got 'cube'"):
        check_activation("hidden_act", "cube")
    with pytest.raises(ValueError, match=r"got 'cube'"):
        activation_of("cube")
