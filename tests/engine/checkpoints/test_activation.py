"""Activations are transformers' own, and its module of them is imported only where it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers.activations import ACT2FN

from engine.checkpoints.activation import activation_of, check_activation
from tests.support.import_graph import ROOT


@pytest.mark.parametrize("name", ACT2FN)
def test_an_activation_is_transformers(name: str) -> None:
    x = torch.linspace(-9, 9, 999)
    assert torch.equal(activation_of(name)(x), ACT2FN[name](x))


def test_an_unknown_activation_is_told_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"hidden_act must be one of .*quick_gelu.*, got 'cube'"):
        check_activation("hidden_act", "cube")
    with pytest.raises(ValueError, match=r"got 'cube'"):
        activation_of("cube")


def test_configs_check_their_activations_although_the_table_comes_late() -> None:
    code = (
        "import sys\n"
        "from engine.checkpoints.late_activations import import_validators\n"
        "import_validators()\n"
        "assert 'transformers.activations' not in sys.modules\n"
        "from transformers.utils import type_validators\n"
        "assert 'relu' in type_validators.ACT2FN and 'cube' not in type_validators.ACT2FN\n"
        "from transformers.activations import ACT2FN, GELUActivation\n"
        "assert type(ACT2FN['gelu']) is type(type_validators.ACT2FN['gelu']) is GELUActivation\n"
        "assert list(ACT2FN) == list(type_validators.ACT2FN)\n"
        "import transformers.activations\n"
        "assert transformers.activations is sys.modules['transformers.activations']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
