"""Activations are transformers' own, and its module of them is imported only where it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


def test_configs_are_made_without_the_table_which_is_whole_later(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from engine.checkpoints.config_file import load_config\n"
        "load_config(Path(sys.argv[1]), trust_remote_code=False)\n"
        "assert 'transformers.utils.type_validators' in sys.modules\n"
        "assert 'transformers.activations' not in sys.modules\n"
        "from transformers.activations import ACT2FN, GELUActivation\n"
        "assert type(ACT2FN['gelu']) is GELUActivation\n"
        "import transformers.activations\n"
        "assert transformers.activations is sys.modules['transformers.activations']\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT)
