"""``omni bench`` counts the same in process and over HTTP."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from omni.commands.cli import app
from tests.support.live_server import LiveServer


def measured(out: Path, *flags: str) -> Any:
    result = CliRunner().invoke(app, ["bench", *flags, "-o", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    (level,) = json.loads(out.read_text())["levels"]
    return level


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_tokens_and_hits_are_the_same_in_process_and_over_http(
    server: LiveServer, endpoint: str, tmp_path: Path
):
    """One request at a time, so that hits do not depend on the order."""
    flags: tuple[str, ...] = ("--endpoint", endpoint, "--requests", "6", "--turns", "2")
    flags += ("--prompt-tokens", "60", "--shared-prefix-tokens", "32", "--max-tokens", "7")
    flags += ("--seed", "4711", "--temperature", "0", "--ignore-eos", "--warmup", "2")
    within = measured(tmp_path / "within.json", "two_step", *flags)
    over = measured(tmp_path / "over.json", "--url", server.url, "--model", "two_step", *flags)
    assert within["requests"]["ok"] == over["requests"]["ok"] == 6
    assert within["tokens"] == over["tokens"]
    assert over["tokens"]["output"] == 42 and over["tokens"]["cached"] > 0
    counts = [level["latencies"]["between_tokens"]["count"] for level in (within, over)]
    # A server sends accumulated tokens as one piece.
    assert 0 < counts[1] <= counts[0]


def test_every_endpoint_is_measured(checkpoint_cache: object, tmp_path: Path):
    question = resources.files("stage_configs") / "spoken_sums/questions/twelve_plus_thirty.flac"
    (tmp_path / "in.jsonl").write_text(json.dumps({"audio": [str(question)]}))
    models = {
        "chat": "omni_speech",
        "speech": "omni_speech",
        "realtime": "omni_speech",
        "embeddings": "encode_then_generate",
        "transcriptions": "transcribe_then_summarize",
    }
    flags = ("--requests", "2", "--warmup", "0")
    levels = {}
    with LiveServer([*dict.fromkeys(models.values())]) as speaking:
        for endpoint, model in models.items():
            url = ("--url", speaking.url, "--model", model, "--endpoint", endpoint)
            more: tuple[str, ...] = ("--prompt-tokens", "24")
            if endpoint == "transcriptions":
                more = ("-i", str(tmp_path / "in.jsonl"))
            if endpoint in ("chat", "realtime"):
                more += ("--speech", "--voice", "Ethan")
            levels[endpoint] = measured(tmp_path / "out.json", *url, *flags, *more)
        url = ("--url", speaking.url, "--model", "omni_speech", "--max-tokens", "6")
        silent = measured(tmp_path / "silent.json", *url, *flags)
    assert silent["audio_s"] == 0 and "first_audio" not in silent["latencies"]
    assert levels["chat"]["latencies"]["real_time_factor"]["count"] == 2
    for level in levels.values():
        assert level["requests"]["ok"] == level["latencies"]["end_to_end"]["count"] == 2
    for endpoint in ("chat", "speech", "realtime"):
        assert levels[endpoint]["audio_s"] > 0
        assert levels[endpoint]["latencies"]["first_audio"]["count"] == 2
    assert levels["realtime"]["tokens"]["output"] > 2
    assert levels["embeddings"]["tokens"]["prompt"] > 20
    assert "first_token" not in levels["transcriptions"]["latencies"]
