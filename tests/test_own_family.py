"""The page that adds a family from outside: its files are written, installed and run."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from engine import SamplingParams, register_model_family
from engine.models.registry import FAMILIES
from omni import Omni, OmniRequest
from tests.support.import_graph import ROOT

PAGE = ROOT / "docs" / "own_family.md"
RUN = """
import runpy, sys, pytest
runpy.run_path("tiny.py")
status = pytest.main(["-q", "-p", "no:cacheprovider", "test_smollm3.py"])
runpy.run_path("in_this_process.py")
from omni.commands.cli import app
from typer.testing import CliRunner
for arguments, said in ((["list", "architectures"], "SmolLM3ForCausalLM"),
                        (["explain", "smollm3.yaml", "--no-load"], "KV pages")):
    assert said in CliRunner().invoke(app, arguments).output, arguments
sys.exit(status)
"""


def files() -> dict[str, str]:
    """Return the blocks of the page that are files, by name."""
    found = re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```', PAGE.read_text("utf-8"), re.S | re.M)
    assert len(dict(found)) == len(found)
    return dict(found)


def install(package: Path) -> None:
    """Write what an editable install creates: modules, and an entry point."""
    project = tomllib.loads((package / "pyproject.toml").read_text("utf-8"))["project"]
    about = package / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\n")
    (group, names), *others = project["entry-points"].items()
    assert not others
    lines = [f"[{group}]", *(f"{name} = {place}" for name, place in names.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")


def test_the_family_of_the_page_is_found_by_its_entry_point_and_judged(tmp_path: Path) -> None:
    written = files()
    package = tmp_path / "smollm3_family"
    package.mkdir()
    for name, content in written.items():
        inside = name in ("pyproject.toml", "smollm3_family.py")
        ((package if inside else tmp_path) / name).write_text(content)
    install(package)
    # In one process: transformers takes seconds to import.
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr


def test_a_model_of_two_parts_speaks_when_it_is_added_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_cache: object
) -> None:
    asked = OmniRequest("Say this.", sampling={"backbone": SamplingParams(max_tokens=9, seed=1)})
    with Omni("csm_seeded") as omni:
        (expected,) = omni.generate([asked])
    others = {name: row for name, row in FAMILIES.rows.items() if row.whole != "csm"}
    assert len(others) == len(FAMILIES.rows) - 2
    monkeypatch.setattr(FAMILIES, "rows", others)
    monkeypatch.setattr(FAMILIES, "_added", {})
    with pytest.raises(ValueError, match="one model without parts"):
        Omni("csm_seeded")
    (tmp_path / "speaking_family.py").write_text(files()["speaking_family.py"])
    brought = runpy.run_path(str(tmp_path / "speaking_family.py"))
    for name in ("BACKBONE", "CODEC"):
        register_model_family(brought[name])
    with Omni("csm_seeded") as omni:
        (said,) = omni.generate([asked])
    ours, theirs = (each.stages["codec"].audio for each in (said, expected))
    assert ours is not None and theirs is not None and len(ours.samples) == 9 * 1920
    assert torch.equal(ours.samples, theirs.samples)
