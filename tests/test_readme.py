"""What the README shows, runs as it stands there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omni.cli import app
from tests.support.import_graph import ROOT


def snippet(language: str) -> str:
    """The README's only block of that language."""
    (found,) = re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.S | re.M
    )
    return str(found)


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_python_pipeline_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "first.py"
    script.write_text(snippet("python"))
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.count("torch.Size([") == 2


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_yaml_pipeline_runs_with_the_commands_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("first.yaml").write_text(snippet("yaml"))
    text = (ROOT / "README.md").read_text("utf-8")
    commands = re.findall(r"^omni (.* first\.yaml.*|\w+ first\.yaml)$", text, re.M)
    assert [command.split()[0] for command in commands] == ["run", "explain", "verify"]
    for command in commands:
        arguments = re.findall(r'"[^"]*"|\S+', command)
        result = CliRunner().invoke(app, [argument.strip('"') for argument in arguments])
        assert result.exit_code == 0, result.output


def test_the_table_of_commands_is_complete():
    text = (ROOT / "README.md").read_text("utf-8")
    listed = re.findall(r"^\| `omni (\w+)", text, re.M)
    known = [command.callback.__name__ for command in app.registered_commands if command.callback]
    assert sorted(listed) == sorted(known)
