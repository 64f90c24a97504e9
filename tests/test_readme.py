"""The examples of the README and the documentation's pages run as printed there."""

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
import yaml
from PIL import Image
from typer.testing import CliRunner

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.models.registry import FAMILIES
from omni.commands.cli import app
from tests.support.encoder_decoder_requests import tone, write_wav
from tests.support.import_graph import LAYERS, ROOT, modules
from tests.support.pages import README, commands, snippets
from tests.support.videos import moving_picture, video_file


def the_script(file: str, has: str, folder: Path) -> str:
    """Return the Python block of a page that contains some text, as a file."""
    (block,) = (block for name, block in snippets("python") if name == file and has in block)
    (folder / "shown.py").write_text(block)
    return str(folder / "shown.py")


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_python_pipeline_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runpy.run_path(the_script("README.md", "Pipeline", tmp_path), run_name="__main__")
    assert capsys.readouterr().out.count("torch.Size([") == 2


def test_the_python_stream_prints_text_before_sound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runpy.run_path(the_script("voice_assistant.md", "audio_delta", tmp_path), run_name="__main__")
    text, *sounds = capsys.readouterr().out.split("s of sound: (")
    assert text.splitlines()[0] and len(sounds) > 1


def test_a_turn_of_the_conversation_hits_the_turn_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runpy.run_path(the_script("voice_assistant.md", "messages.append", tmp_path))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("12 + 30 = forty two (0 of ")
    assert second.startswith("42 * 2 = eighty four (") and "(0 of" not in second


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_prompts_of_the_checklist_do_not_hit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runpy.run_path(the_script("prefix_misses.md", "num_cached_tokens", tmp_path))
    short, why_short, long, why_long = capsys.readouterr().out.splitlines()
    assert (short, why_short, why_long) == ("0 of 4 prompt tokens hit", "short", "unseen")
    assert long.startswith("0 of ")


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_test_of_ones_own_passes(tmp_path: Path):
    names = runpy.run_path(the_script("caches.md", "omni.testing", tmp_path))
    (test,) = (value for name, value in names.items() if "test_" in name)
    test()


def test_a_model_of_ones_own_is_declared_as_shown(
    seeded: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is Qwen3's under another name: a decoder with normed queries and keys."""
    monkeypatch.setattr(FAMILIES, "_added", {})
    runpy.run_path(the_script("models.md", "register_model_family", tmp_path))
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


NOT_RUN_HERE = {
    "make ": "sets up an environment: what CI itself runs",
    "pip install": "the same",
    "PIP_EXTRA_INDEX_URL": "the same",
    "arecord": "records sound",
    "omni demo": "tests/omni/commands/test_demo.py runs it",
    "omni run qwen": "needs the published checkpoint",
    "omni run examples/smollm2": "needs a package of 98 MB; tests/examples runs it where it is",
    "omni serve": "serves until it is stopped; tests/omni/server runs it",
    "OTEL_": "the same; tests/omni/server/test_request_spans.py runs it",
    "curl": "asks that server",
    "omni bench --url": "the same; tests/omni/commands/bench asks others",
    "omni bench spoken_sums": "takes half a minute; tests/omni/commands/bench does so",
    "ray start": "starts a cluster; tests of commands start their own",
    'omni run two_step --prompt "Once upon a time" --runtime ray --address': "joins that cluster",
}


@pytest.fixture(scope="module")
def shown_files(tmp_path_factory: pytest.TempPathFactory, checkpoint_cache: Path) -> Path:
    """A folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("shown")
    for _, block in reversed(snippets("yaml")):  # the README comes last, and wins
        (folder / f"{yaml.safe_load(block)['name']}.yaml").write_text(block)
    (folder / "requests.jsonl").write_text("".join(block for _, block in snippets("json")))
    Image.new("RGB", (28, 28)).save(folder / "photo.png")
    write_wav(folder / "question.wav", tone(0.5))
    (folder / "clip.mp4").write_bytes(video_file("mp4", moving_picture(8)))
    return folder


def on_ray(command: str) -> bool:
    return "--runtime ray" in command


@pytest.mark.parametrize(
    "command",
    [each for each in commands() if not each.startswith(tuple(NOT_RUN_HERE))],
)
def test_the_command_works_as_printed(
    command: str,
    shown_files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if on_ray(command):  # one for all tests; tests of commands start their own
        request.getfixturevalue("ray_cluster")
    assert command.startswith("omni "), f"say how {command!r} is tested, or why it is not"
    folder = shutil.copytree(shown_files, tmp_path / "folder")
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert "nothing was proven" not in result.output
    if "--output-dir" in command:
        (out,) = re.findall(r"--output-dir (\S+)", command)
        sounds = [file.stat().st_size for file in (folder / out).glob("audio/*/*.wav")]
        lines = (folder / out / "outputs.jsonl").read_text("utf-8").splitlines()
        assert len(sounds) == len(lines) and min(sounds) > 1000


def test_what_is_not_run_is_there() -> None:
    for beginning in NOT_RUN_HERE:
        assert any(each.startswith(beginning) for each in commands()), beginning


def test_the_lines_of_requests_are_right(
    shown_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shown_files)
    result = CliRunner().invoke(app, ["validate", "omni_speech", "--input", "requests.jsonl"])
    assert result.exit_code == 0, result.output


def test_the_table_of_commands_is_complete():
    text = (ROOT / "docs/cli.md").read_text("utf-8")
    listed = re.findall(r"^\| `omni (\w+)", text, re.M)
    known = [
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback
    ]
    assert sorted(listed) == sorted(known)


def test_the_table_of_environment_variables_is_complete():
    text = (ROOT / "docs/cli.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `(OMNI_\w+)` \|", text, re.M))
    sources = [file.read_text("utf-8") for each in LAYERS for file in modules(each)]
    trees = [ast.parse(source) for source in sources if "OMNI_" in source]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    variables = {text for text in used - named if re.fullmatch("OMNI_[A-Z_]+", text)}
    assert listed == variables


def test_the_readme_fits_a_page() -> None:
    assert len(README.read_bytes()) <= 12 * 1024
