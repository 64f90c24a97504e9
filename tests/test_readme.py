"""What the README shows, runs as it stands there."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.models.registry import FAMILIES
from omni.commands.cli import app
from tests.support.encoder_decoder_requests import tone, write_wav
from tests.support.import_graph import LAYERS, ROOT, modules
from tests.support.videos import moving_picture, video_file


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


def test_a_model_of_ones_own_is_declared_as_shown(
    seeded: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is Qwen3's under another name: a decoder with normed queries and keys."""
    monkeypatch.setattr(FAMILIES, "_added", {})
    (declaration,) = (block for block in snippets("python") if "register_model_family" in block)
    script = tmp_path / "mine.py"
    script.write_text(declaration)
    runpy.run_path(str(script))
    shutil.copytree(seeded("qwen3"), tmp_path / "mine")
    config = json.loads((tmp_path / "mine/config.json").read_text())
    config |= {"architectures": ["MineForCausalLM"], "model_type": "mine"}
    (tmp_path / "mine/config.json").write_text(json.dumps(config))
    first, second = (
        LLMEngine(EngineConfig(model=str(folder), num_blocks=16, max_model_len=64)).generate(
            ["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=8)
        )[0]
        for folder in (seeded("qwen3"), tmp_path / "mine")
    )
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def commands() -> list[str]:
    """What the README's shell blocks say, a command a line, without comments."""
    blocks = "".join(snippets("bash")).replace("\\\n", " ")
    lines = (re.sub(r"\s+# .*", "", line).strip() for line in blocks.splitlines())
    return [line for line in lines if line]


NOT_RUN_HERE = {
    "make ": "sets up an environment: what CI itself runs",
    "pip install": "the same",
    "omni run qwen2_5_omni": "needs the published checkpoint",
    "omni serve": "serves until it is told to stop; tests/omni/server runs it",
    "curl": "asks that server",
    "omni bench --url": "the same; tests/omni/commands/bench asks others",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint_cache: Path) -> Path:
    """A folder with the files that the README's commands name, in which they run in order."""
    folder = tmp_path_factory.mktemp("readme")
    (first,) = snippets("yaml")
    (folder / "first.yaml").write_text(first)
    write_wav(folder / "question.wav", tone(0.5))
    (folder / "clip.mp4").write_bytes(video_file("mp4", moving_picture(8)))
    return folder


def on_ray(command: str) -> bool:
    return "--runtime ray" in command


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=[pytest.mark.programs] if on_ray(each) else [])
        for each in commands()
        if not each.startswith(tuple(NOT_RUN_HERE))
    ],
)
def test_the_command_works_as_printed(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if on_ray(command):  # one for all tests; tests of commands start their own
        request.getfixturevalue("ray_cluster")
    assert command.startswith("omni "), f"say how {command!r} is tested, or why it is not"
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert "nothing was proven" not in result.output
    if "--output-dir" in command:
        (out,) = re.findall(r"--output-dir (\S+)", command)
        assert (folder / out / "audio/prompt-1/code2wav.wav").stat().st_size > 1000


def test_what_is_not_run_is_there() -> None:
    for beginning in NOT_RUN_HERE:
        assert any(each.startswith(beginning) for each in commands()), beginning


def test_the_lines_of_requests_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (28, 28)).save("photo.png")
    Path("requests.jsonl").write_text("".join(snippets("json")))
    result = CliRunner().invoke(app, ["validate", "omni_speech", "--input", "requests.jsonl"])
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
    sources = [file.read_text("utf-8") for each in LAYERS for file in modules(each)]
    trees = [ast.parse(source) for source in sources if "OMNI_" in source]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    variables = {text for text in used - named if re.fullmatch("OMNI_[A-Z_]+", text)}
    assert listed == variables
