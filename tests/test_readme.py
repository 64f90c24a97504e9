"""What the README shows, runs as it stands there."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omni.commands.cli import app
from tests.support.encoder_decoder_requests import tone, write_wav
from tests.support.import_graph import LAYERS, ROOT, modules


def snippets(language: str) -> list[str]:
    """The README's blocks of that language, in order."""
    text = (ROOT / "README.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_python_pipeline_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, *_ = snippets("python")
    script = tmp_path / "first.py"
    script.write_text(first)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.count("torch.Size([") == 2


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_python_stream_prints_text_before_sound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, streaming, *_ = snippets("python")
    script = tmp_path / "streaming.py"
    script.write_text(streaming)
    runpy.run_path(str(script), run_name="__main__")
    text, *sounds = capsys.readouterr().out.split("s of sound: (")
    assert text.splitlines()[0] and len(sounds) > 1


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_test_of_ones_own_passes(tmp_path: Path):
    (own,) = (block for block in snippets("python") if "omni.testing" in block)
    script = tmp_path / "own.py"
    script.write_text(own)
    (test,) = (value for name, value in runpy.run_path(str(script)).items() if "test_" in name)
    test()


@pytest.mark.usefixtures("checkpoint_cache")
def test_voice_in_voice_out_runs_with_the_command_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_wav(Path("question.wav"), tone(0.5))
    (block,) = (block for block in snippets("bash") if "omni_speech" in block)
    command, written = re.findall(r"^omni (.*) # (\S+)$", block.replace("\\\n", " "), re.M)[0]
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    assert Path(written).stat().st_size > 1000


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_yaml_pipeline_runs_with_the_commands_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (first,) = snippets("yaml")
    Path("first.yaml").write_text(first)
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
    known = [
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback
    ]
    assert sorted(listed) == sorted(known)


def test_the_table_of_environment_variables_is_complete():
    text = (ROOT / "README.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `(OMNI_\w+)` \|", text, re.M))
    trees = [ast.parse(file.read_text("utf-8")) for each in LAYERS for file in modules(each)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    variables = {text for text in used - named if re.fullmatch("OMNI_[A-Z_]+", text)}
    assert listed == variables
