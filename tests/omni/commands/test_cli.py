"""The command line, end to end with small real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import yaml
from safetensors.torch import load_file, save_file

from omni import AutoregressiveStage, Pipeline
from omni.pipelines.config_file import shipped_configs
from omni.pipelines.pipeline_config import PipelineConfig
from omni.verification import verify as verification
from tests.support.command_line import omni, read_outputs, write_requests
from tests.support.encoder_decoder_requests import tone, write_wav
from tests.support.tables import rows

OFFLINE = [
    name
    for name in shipped_configs()
    if all(
        stage.model.startswith("seeded:") or Path(stage.model).is_dir()
        for stage in PipelineConfig.load(name).stages.values()
    )
]
# test_demo.py runs and verifies this one by voice and by text.
SHOWN = {"spoken_sums"}
SHORT = [
    f"--set=stages.{stage}.sampling.max_tokens={number}"
    for stage, number in (("writer", 4), ("reader", 3))
]


@pytest.fixture(autouse=True)
def _checkpoints(checkpoint_cache: Path) -> None:
    """Build ``seeded:`` models once for all tests, in the tests' cache."""


def test_run_prints_every_final_stages_text_and_a_summary() -> None:
    prompts = ("-p", "A quick brown fox", "-p", "Once upon a time")
    result = omni("run", "two_step", *prompts, *SHORT, status=0)
    lines = result.stdout.splitlines()
    for number in (1, 2):
        start = lines.index(f"=== prompt-{number}")
        assert lines[start + 1] == "--- writer"
        assert "--- reader" in lines[start:]
    assert "requests: 2, failed: 0" in result.stderr
    assert "hit tokens" in result.stderr


def test_quiet_prints_only_the_texts() -> None:
    result = omni("run", "two_step", "-p", "A quick brown fox", *SHORT, "--quiet", status=0)
    assert result.stderr == ""
    assert result.stdout.startswith("=== prompt-1\n--- writer\n")


def test_run_writes_the_outputs_of_good_and_bad_requests(
    tmp_path: Path, qwen2_checkpoint: str
) -> None:
    save_file({"embeds": torch.zeros(2, 63)}, tmp_path / "narrow.safetensors")
    requests = write_requests(
        tmp_path,
        {"request_id": "text", "prompt": "A quick brown fox"},
        {"request_id": "nobody", "prompt": "x", "sampling": {"writr": {}}},
        "{",
        {
            "request_id": "tokens",
            "prompt_token_ids": [7, 8, 9],
            "sampling": {"writer": {"max_tokens": 1}},
        },
        {"request_id": "text", "prompt": "again"},
        {"request_id": "long", "prompt_token_ids": [5] * 2000},
        {"request_id": "narrow", "prompt_embeds": "narrow.safetensors"},
        {"request_id": "../chat", "prompt": [{"role": "user", "content": "hello"}]},
    )
    out = tmp_path / "out"
    result = omni("run", "two_step", "--input", requests, "--output-dir", out, *SHORT, status=1)
    lines = read_outputs(out)
    assert f"\n--- reader\n{lines[0]['stages']['reader']['text']}\n" in result.stdout
    assert [line["request_id"] for line in lines] == [
        "text", "nobody", "line-3", "tokens", "text", "long", "narrow", "../chat",
    ]  # fmt: skip
    errors = {number: line["error"] for number, line in enumerate(lines) if line["error"]}
    assert list(errors) == [1, 2, 4, 5, 6]
    assert "requests.jsonl:2: sampling.writr: unknown stage; did you mean 'writer'?" in errors[1]
    assert "requests.jsonl:3:2: not valid JSON" in errors[2]
    assert "'text' is already used on line 1" in errors[4]
    assert "2000" in errors[5] and "1024" in errors[5]
    assert "63" in errors[6] and "64" in errors[6]
    assert all(error.splitlines()[0] in result.stderr for error in errors.values())
    for number, num_tokens in ((0, 4), (3, 1), (7, 4)):
        writer = lines[number]["stages"]["writer"]
        assert len(writer["token_ids"]) == num_tokens
        assert writer["finish_reason"] == "length"
        assert "tensors" not in writer, "only its text is final"
        assert len(lines[number]["stages"]["reader"]["token_ids"]) == 3
        assert (
            lines[number]["stages"]["reader"]["num_prompt_tokens"]
            == writer["num_prompt_tokens"] + num_tokens - 1
        )


def test_tensors_are_written_to_the_files_of_the_lines(tmp_path: Path) -> None:
    prompt = ("-p", "a quick brown fox")
    omni("run", "encode_then_generate", *prompt, "-o", tmp_path, "-q", status=0)
    (line,) = read_outputs(tmp_path)
    encoder, generator = line["stages"]["encoder"], line["stages"]["generator"]
    loaded = {name: load_file(tmp_path / file)[name] for name, file in encoder["tensors"].items()}
    rows = encoder["num_prompt_tokens"]
    assert loaded["hidden_states"].shape == (rows, 64)
    torch.testing.assert_close(loaded["pooled"], loaded["hidden_states"].mean(0))
    assert generator["num_prompt_tokens"] == rows
    assert "text" not in encoder


def inputs_of(name: str, folder: Path) -> list[str | Path]:
    """Flags of two inputs for a shipped pipeline."""
    if name == "transcribe_then_summarize":
        files = [write_wav(folder / f"{hz}.wav", tone(0.8, hz)) for hz in (300.0, 500.0)]
        return ["--audio", files[0], "--audio", files[1], "--language", "en"]
    if name == "qwen3_omni_seeded":  # its talker needs a turn of the assistant
        return ["--chat", "a quick brown fox", "--chat", "a quick brown dog"]
    prompt = "a quick brown fox jumps over the lazy dog, and the dog sleeps on in the rain"
    return ["-p", prompt, "-p", prompt + ". Why?"]


@pytest.mark.parametrize("name", sorted({*OFFLINE} - SHOWN))
def test_verify_finds_every_shipped_config_equal(name: str, tmp_path: Path) -> None:
    result = omni("verify", name, *inputs_of(name, tmp_path), status=0)
    assert "cached equals uncached: 2 of 2" in result.stdout


def test_speech_becomes_text_and_the_text_a_summary(tmp_path: Path) -> None:
    """By line and by flag; requests in another language or form are independent."""
    sound = write_wav(tmp_path / "a.wav", tone(1.0))
    # Longer than the window, with another sampling rate.
    soundfile.write(tmp_path / "long.mp3", np.concatenate([tone(1.3), tone(1.2, 900.0)]), 22_050)
    requests = write_requests(
        tmp_path,
        {"request_id": "english", "audio": [{"file": sound.name, "language": "en"}]},
        {"request_id": "german", "audio": [{"file": sound.name, "language": "de"}]},
        {"request_id": "text", "prompt": "no sound"},
        {"request_id": "long", "audio": [{"file": "long.mp3", "language": "en"}]},
    )
    names = "[hidden_states,encoder_hidden_states]"
    omni(
        *("run", "transcribe_then_summarize", "-i", requests, "-o", tmp_path / "out", "-q"),
        *("--set", f"stages.transcriber.outputs={names}"),
        *("--set", "stages.transcriber.final_output=[text,tensors]"),
        status=1,
    )
    english, german, text, long = read_outputs(tmp_path / "out")
    assert "takes audio" in text["error"]
    assert long["error"] is None
    said = long["stages"]["transcriber"]
    assert said["text"] and len(said["token_ids"]) > len(set(said["token_ids"])) > 2
    assert english["stages"]["transcriber"]["text"] != german["stages"]["transcriber"]["text"]
    rows = [
        load_file(tmp_path / "out" / path)
        for path in english["stages"]["transcriber"]["tensors"].values()
    ]
    assert sorted(len(tensor) for each in rows for tensor in each.values()) == [35, 100]
    summary = english["stages"]["summarizer"]
    assert summary["text"] and summary["num_prompt_tokens"] == 2
    assert len(summary["encoder_prompt_token_ids"]) > 2
    flags = ["--audio", sound, "--audio", tmp_path / "long.mp3", "--language", "en", "-q"]
    result = omni("run", "transcribe_then_summarize", *flags)
    assert said["text"] in result.stdout
    assert english["stages"]["transcriber"]["text"] in result.stdout
    assert summary["text"] in result.stdout


def test_verify_exits_with_1_when_a_cached_row_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is changed between the run that fills the caches and the one with hits."""
    real = verification._run
    cached_runs: list[Any] = []

    def run_and_plant(pipeline: Pipeline, *args: Any, caching: bool) -> Any:
        done = real(pipeline, *args, caching=caching)
        if caching and not cached_runs:
            cached_runs.append(done)
            stage = pipeline.stages["writer"]
            assert isinstance(stage, AutoregressiveStage)
            slots = torch.arange(16, stage.engine.memory_plan.num_blocks * 16, 16)
            rows = torch.full((len(slots), 64), 0.25)
            stage.engine._kv.stage_outputs.write(slots, {"hidden_states": rows})
        return done

    monkeypatch.setattr(verification, "_run", run_and_plant)
    prompt = "a quick brown fox jumps over the lazy dog, and the dog sleeps on in the rain"
    result = omni("verify", "two_step", "-p", prompt, status=1)
    assert "DIFFERS" in result.stdout
    assert "request 'prompt-1', stage 'writer', warm cache" in result.stdout


def test_verify_exits_with_1_when_a_request_fails_in_every_run(tmp_path: Path) -> None:
    requests = write_requests(
        tmp_path,
        {"prompt_token_ids": [5, 6]},
        {"request_id": "long", "prompt_token_ids": [5] * 2000},
    )
    result = omni("verify", "two_step", "-i", requests, *SHORT, status=1)
    assert "cached equals uncached: 1 of 2" in result.stdout
    assert "failed without caching, not compared: request 'long'" in result.stdout


def test_verify_exits_with_3_without_cache_hits() -> None:
    """A prompt and outputs shorter than a block."""
    result = omni("verify", "two_step", "-p", "Hi", *SHORT, status=3)
    assert result.output.startswith("NOTHING WAS PROVEN")


def test_verify_takes_a_tolerance() -> None:
    prompt = "A quick brown fox jumps over the lazy dog, and the dog sleeps on in the rain"
    result = omni("verify", "two_step", "-p", prompt, *SHORT, "--atol", "0.5", status=0)
    assert "allowed 5.0e-01\n" in result.stdout
    assert "noise" not in result.stdout
    settings = (f"stages.{name}.engine.deterministic=true" for name in ("writer", "reader"))
    flags = [flag for setting in settings for flag in ("--set", setting)]
    result = omni("verify", "two_step", "-p", prompt, *SHORT, "--exact", *flags, status=0)
    assert "allowed 0.0e+00" in result.output
    result = omni("verify", "two_step", "-p", "x", "--exact", "--atol", "0.5")
    assert result.exit_code == 2 and "exact allows no difference" in result.stderr

    result = omni("verify", "two_step", "-p", "x", "--atol", "-1", status=2)
    assert "atol must not be negative" in result.stderr


@pytest.mark.parametrize("name", OFFLINE)
def test_explain_shows_the_graph_every_default_and_the_memory(name: str, tmp_path: Path) -> None:
    result = omni("explain", name, status=0)
    config = PipelineConfig.load(name)
    transforms = [stage.inputs.transform_name for stage in config.stages.values() if stage.inputs]
    assert all(transform in result.stdout for transform in transforms)
    assert "Resolved and reserved" in result.stdout
    assert "weights" in result.stdout
    assert "KV cache" in result.stdout
    settings = result.stdout.split("Every setting:")[1].split("Resolved and reserved")[0]
    explained = tmp_path / "explained.yaml"
    explained.write_text(settings, encoding="utf-8")
    assert yaml.safe_load(settings)["name"] == name
    assert omni("validate", explained).exit_code == 0


def test_explain_shows_the_graph_before_it_fails_to_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = omni("explain", "two_step", "--set", f"stages.writer.model={tmp_path}", status=2)
    assert "writer ──hidden_states_as_prompt_embeds──► reader" in result.stdout
    assert str(tmp_path) in result.stderr


def test_explain_can_skip_loading_models() -> None:
    result = omni("explain", "two_step", "--no-load", "--set", "stages.writer.model=some/hub-id")
    assert result.exit_code == 0
    assert "writer  autoregressive  some/hub-id" in result.stdout
    assert "Resolved and reserved" not in result.stdout


def test_validate_checks_requests(tmp_path: Path) -> None:
    good = write_requests(tmp_path, {"prompt": "x"})
    assert omni("validate", "two_step", "--input", good).exit_code == 0
    bad = write_requests(tmp_path, {"prompt": "x"}, {"promt": "x"}, "{")
    result = omni("validate", "two_step", "--input", bad, status=2)
    assert "requests.jsonl:2: promt: unknown key; did you mean 'prompt'?" in result.stderr
    assert "requests.jsonl:3:2: not valid JSON" in result.stderr


BAD_INPUT = rows("""
run two_stp -p x | did you mean 'two_step'?
validate two_step --set stages.writer.model=./nowhere | stages.writer.model: no such folder or file
run two_step | give either --chat, --prompt
verify two_step -p x --language en | --language stands beside --audio only
run two_step -p x -i requests.jsonl | give either --chat, --prompt
run two_step -i absent.jsonl | absent.jsonl: cannot be read
run two_step -p x --set oops | PLACE=VALUE
run two_step -p x --set stages.writer.model=seeded:bert | writer.kind: model 'seeded:bert': archit
run two_step -p x -o /dev/null/x | give an --output-dir that can be made
""")


@pytest.mark.parametrize(("command", "expected"), BAD_INPUT)
def test_bad_input_is_one_clear_error_without_a_traceback(command: str, expected: str) -> None:
    result = omni(*command.split(), status=2)
    assert expected in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="no such folder or file"):
        omni("validate", "two_step", "--set", "stages.writer.model=./nowhere", "--debug")
