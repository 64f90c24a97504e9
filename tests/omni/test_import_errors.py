"""An error names the user's own ``engine.py`` that shadows the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.import_graph import ROOT


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(script)
    return subprocess.run(
        [sys.executable, "mine.py"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", ["engine.py", "stages.py", "prefix_cache/__init__.py"])
def test_a_module_that_hides_a_package_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("answer = 42\n")
    done = run(tmp_path, "from omni import Prompt")
    assert done.returncode == 1
    package = name.partition("/")[0].removesuffix(".py")
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"ImportError: omni needs its package {package!r}, which {tmp_path}/")
    assert "rename that module" in message


def test_other_modules_hide_nothing(tmp_path: Path) -> None:
    (tmp_path / "models.py").touch()
    (tmp_path / "engine").mkdir()  # without a module in it: no package
    assert run(tmp_path, "from omni import SamplingParams").returncode == 0


def test_the_command_line_looks_for_its_packages_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("raise SystemExit('run by mistake')\n")
    done = subprocess.run(
        [sys.executable, "-m", "omni", "validate", "two_step"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
