"""Code of a pipeline: only what its file names and has next to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import omni

ROOT = Path(__file__).parents[3]

PIPELINE = """\
name: mine
stages:
  writer:
    kind: autoregressive
    model: {model}
    engine: {{block_size: 4, num_blocks: 32, max_model_len: 64}}
    sampling: {{temperature: 0.0, max_tokens: 3}}
    outputs: []
  reader:
    kind: autoregressive
    model: {model}
    engine: {{block_size: 4, num_blocks: 32, max_model_len: 64}}
    sampling: {{temperature: 0.0, max_tokens: 3}}
    inputs: {{from: writer, transform: {transform}}}
    outputs: []
    final_output: text
"""
BOMB = "open({!r}, 'a').write(__name__ + ' ')\n"
BACKWARDS = (
    "from engine import TokensPrompt\n"
    "def backwards(context):\n"
    "    return TokensPrompt(context.sources[0].token_ids[::-1])\n"
)
CONSOLE = "import sys; from omni.commands.cli import app; sys.argv[0] = 'omni'; app()"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A file to which every executed module writes its name."""
    return tmp_path / "traces.txt"


def call(folder: Path, *arguments: object, as_script: bool = False, **environment: str):
    """``omni ...`` in a folder, as ``python -m omni`` or as its console script calls it."""
    start = ["-P", "-c", CONSOLE] if as_script else ["-m", "omni"]
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def trap(folder: Path, traces: Path) -> None:
    """Create modules that shadow those of libraries if the folder is searched."""
    for name in ("tabulate", "typer", "yaml", "sitecustomize", "omni_stages", "wandb"):
        (folder / f"{name}.py").write_text(BOMB.format(str(traces)))
    about = folder / "trap-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: trap\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[omni_pipeline.stage_kinds]\ntrap = tabulate:X\n"
        "[omni_pipeline.model_families]\ntrap = tabulate:X\n"
    )


def test_only_code_next_to_the_file_runs_and_none_of_the_working_directory(
    tmp_path: Path, traces: Path, seeded: Callable[[str], str]
) -> None:
    folder, here = tmp_path / "pipeline", tmp_path / "here"
    for place in (folder, here):
        place.mkdir()
        trap(place, traces)
    (folder / "my_transform.py").write_text(BACKWARDS)
    (here / "my_transform.py").write_text(BOMB.format(str(traces)) + BACKWARDS)
    config = folder / "mine.yaml"
    config.write_text(PIPELINE.format(model=seeded("qwen2"), transform="my_transform:backwards"))
    done = call(here, "run", config, "--prompt", "hello", "--quiet")
    assert done.returncode == 0, done.stderr
    (here / "kind.yaml").write_text("name: a\nstages: {a: {kind: trap, final_output: text}}\n")
    done = call(here, "validate", "kind.yaml", as_script=True)
    assert "unknown kind 'trap'" in done.stderr
    assert not traces.exists(), traces.read_text()


def test_validate_runs_no_code(tmp_path: Path, traces: Path) -> None:
    config, file = tmp_path / "mine.yaml", tmp_path / "my_transform.py"
    config.write_text(PIPELINE.format(model="seeded:qwen2", transform="my_transform:backwards"))
    file.write_text(BOMB.format(str(traces)) + BACKWARDS)
    done = omni("validate", config, status=0)
    assert f"stage reader: its transform {file}:backwards is there; it was not run" in done.stdout
    assert not traces.exists()
    file.write_text("def backward(context): ...")
    done = omni("validate", config, status=2)
    assert "mine.yaml:14: stages.reader.inputs.transform: " in done.stderr
    assert "has no 'backwards'; did you mean 'backward'?" in done.stderr


def test_an_invalid_transform_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/config.json").write_text(
        "{}"
    )  # no model, which would be an error as well
    config, made = tmp_path / "mine.yaml", tmp_path / "here"
    config.write_text(PIPELINE.format(model="./checkpoint", transform="os:system"))
    done = omni("run", config, "--prompt", f"touch {made}", status=2)
    assert "'os:system' is no transform" in done.stderr
    assert not made.exists()


def test_the_working_directory_is_searched_if_pythonpath_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_transform.py").write_text(BACKWARDS)
    override = "stages.reader.inputs.transform=my_transform:backwards"
    monkeypatch.chdir(tmp_path)
    refused = omni("validate", "two_step", "--set", override)
    assert refused.exit_code == 2 and "'my_transform' is not installed" in refused.stderr
    asked = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = call(tmp_path, "validate", "two_step", "--set", override, **asked)
    assert done.returncode == 0, done.stderr
