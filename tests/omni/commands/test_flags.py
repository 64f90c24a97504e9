"""Flags that every command has, and those that change how stages sample; small real models."""

from __future__ import annotations

import base64
import logging
import os
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine import native
from omni.pipelines.pipeline_config import PipelineConfig
from tests.support.command_line import omni, read_outputs, write_requests
from tests.support.encoder_decoder_requests import tone, write_wav


@pytest.fixture(autouse=True)
def _checkpoints(checkpoint_cache: Path) -> None:
    """``seeded:`` models are built once for all tests."""


def stages_of(folder: Path) -> list[dict[str, Any]]:
    lines = read_outputs(folder)
    assert [line["error"] for line in lines] == [None] * len(lines)
    return [line["stages"] for line in lines]


def test_max_tokens_and_temperature_are_for_every_stage_unless_a_request_says(
    tmp_path: Path,
) -> None:
    requests = write_requests(
        tmp_path,
        {"prompt": "Once upon a time"},
        {"prompt": "Once upon a time", "sampling": {"max_tokens": 5}},
        {"prompt": "Once upon a time", "sampling": {"reader": {"max_tokens": 2}}},
    )
    flags = ("--max-tokens", "3", "--temperature", "0", "-q", "--set",
             "stages.writer.sampling={temperature: 1.0, ignore_eos: true}")  # fmt: skip
    result = omni("run", "two_step", "-i", requests, "-o", tmp_path / "out", *flags)
    assert result.exit_code == 0, result.stderr
    said = [
        [len(stage["token_ids"]) for stage in stages.values()]
        for stages in stages_of(tmp_path / "out")
    ]
    assert said == [[3, 3], [5, 5], [3, 2]]
    first, second, third = stages_of(tmp_path / "out")
    assert first["writer"]["token_ids"] == second["writer"]["token_ids"][:3], "all are greedy"
    assert first["writer"]["token_ids"] == third["writer"]["token_ids"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--max-tokens", "-1"], "--max-tokens -1: stage 'writer': max_tokens: should be greater"),
        (["--temperature", "-0.5"], "--temperature -0.5: stage 'writer': temperature: should be"),
        (["--temperature", "nan"], "--temperature nan: stage 'writer': temperature: should be"),
        (
            ["--max-tokens", "1", "--set", "stages.reader.sampling.min_tokens=3"],
            "--max-tokens 1: stage 'reader': min_tokens (3) is larger than max_tokens (1)",
        ),
        (["--max-tokens", "x"], "--max-tokens"),
    ],
)
@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_wrong_value_names_its_flag(command: str, flags: list[str], told: str) -> None:
    result = omni(command, "two_step", "-p", "x", *flags)
    assert result.exit_code == 2
    assert told in result.stderr


def test_where_nothing_samples_the_flags_are_refused(tmp_path: Path) -> None:
    pipeline = tmp_path / "embed.yaml"
    pipeline.write_text(
        "name: embed\nstages:\n  e: {kind: encoder, model: 'seeded:bert', final_output: tensors}\n"
    )
    result = omni("run", pipeline, "-p", "x", "--max-tokens", "3", "--temperature", "0")
    assert result.exit_code == 2
    told = "--max-tokens 3 --temperature 0.0: no stage of the pipeline 'embed' samples"
    assert told in result.stderr


def test_a_speaker_without_a_name_is_refused() -> None:
    result = omni("run", "omni_speech", "--chat", "x", "--speaker", "")
    assert result.exit_code == 2
    assert "--speaker must not be empty" in result.stderr


def test_it_is_told_when_asked_which_kernels_run() -> None:
    short = ("run", "two_step", "-p", "x", "--max-tokens", "1")
    assert "attention backend" not in omni(*short).stderr
    assert "info: attention backend" in omni(*short, "-v").stderr


@pytest.mark.parametrize("flags", [[], ["-q"]])
def test_a_missing_compiler_is_a_warning_without_a_traceback(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("OMNI_NATIVE", raising=False)
    monkeypatch.setenv("PATH", "")
    native._load_once.cache_clear()
    try:
        result = omni("run", "two_step", "-p", "x", "--max-tokens", "1", *flags)
    finally:
        native._load_once.cache_clear()
    assert result.exit_code == 0
    told = (
        "warning: no native kernels, torch does their work, more slowly: "
        "there is no C compiler (gcc, cc, clang)\n"
    )
    assert result.stderr.count(told) == (0 if flags else 1)
    assert "Traceback" not in result.output


def test_a_backend_that_cannot_be_had_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMNI_NATIVE", "0")
    backend = "stages.writer.engine.attention_backend=native"
    result = omni("run", "two_step", "-p", "x", "--set", backend)
    assert result.exit_code == 2
    assert (
        "error: stage 'writer': the native backend cannot run here: native kernels are turned off "
        "by OMNI_NATIVE=0" in result.stderr
    )


def test_a_cache_that_cannot_be_written_to_is_told_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OMNI_CACHE_DIR", str(tmp_path / "file"))
    result = omni("run", "two_step", "-p", "x")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: stage 'writer': model: the cache ")
    assert "pydantic" not in result.stderr
    with pytest.raises(ValueError, match="stage 'writer': model: the cache"):
        PipelineConfig.load("two_step").resolved("writer")


def test_the_log_of_a_command_ends_with_it() -> None:
    before = list(logging.getLogger("omni").handlers)
    omni("validate", "two_step", "-vv")
    assert logging.getLogger("omni").handlers == before


def test_messages_show_images_and_sound_that_they_bring(tmp_path: Path) -> None:
    """As OpenAI's requests have them, and the same as files beside the messages."""
    picture = BytesIO()
    Image.new("RGB", (60, 40), "teal").save(picture, "PNG")
    (tmp_path / "a.png").write_bytes(picture.getvalue())
    sound = write_wav(tmp_path / "a.wav", tone(0.3)).read_bytes()
    data = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    text = {"type": "text", "text": "What?"}
    brought = [
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "input_audio",
         "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}},
        text,
    ]  # fmt: skip
    named = [{"type": "image"}, {"type": "audio"}, text]
    requests = write_requests(
        tmp_path,
        {"messages": [{"role": "user", "content": brought}]},
        {"prompt": [{"role": "user", "content": named}], "images": ["a.png"], "audio": ["a.wav"]},
    )
    flags = ("--max-tokens", "4", "-q", "-o", tmp_path / "out")
    result = omni("run", "omni_speech", "-i", requests, *flags)
    assert result.exit_code == 0, result.stderr
    ours, theirs = (stages["thinker"] for stages in stages_of(tmp_path / "out"))
    assert ours["num_prompt_tokens"] == theirs["num_prompt_tokens"] > 10
    assert ours["token_ids"] == theirs["token_ids"]


def test_a_bad_image_in_a_message_fails_alone(tmp_path: Path) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    requests = write_requests(
        tmp_path,
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "user", "content": "hello"}]},
    )
    result = omni("run", "omni_speech", "-i", requests, "--max-tokens", "2")
    assert result.exit_code == 1
    assert "line-1: error: " in result.stderr and "cannot be read" in result.stderr
    assert "requests: 2, failed: 1" in result.stderr
    assert os.linesep + "=== line-2" in os.linesep + result.stdout
