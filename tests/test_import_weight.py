"""What only names prompts, settings and stages does not wait for torch and transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import engine
import stages
from tests.support.import_graph import ROOT

HEAVY = ("torch", "transformers", "tokenizers", "xformers", "huggingface_hub")
LIGHT = {
    "a package": "import engine, stages, omni",
    "a prompt": "from engine import EngineConfig, SamplingParams, TokensPrompt; TokensPrompt((1,))",
    "validate": (
        "from omni.commands.cli import app\n"
        "app(['validate', 'two_step'], standalone_mode=False)\n"
        "app(['validate', 'encode_then_generate'], standalone_mode=False)"
    ),
}


@pytest.mark.parametrize("case", LIGHT)
def test_light_work_imports_no_heavy_library(case: str) -> None:
    check = f"found = set({HEAVY}) & set(sys.modules)\nassert not found, found"
    code = f"import sys\n{LIGHT[case]}\n{check}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("package", [engine, stages])
def test_every_public_name_is_there_and_no_other(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert dir(package) == sorted(names)
    assert all(getattr(package, name) is not None for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        package.nonsense  # type: ignore[attr-defined]  # noqa: B018
