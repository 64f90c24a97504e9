"""GuideLLM and aiperf, which measure servers under load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROMPTS = ("Which day is it?", "How many are there?", "Tell me more.", "Yes?")
# aiperf counts the words of answers by itself; any tokenizer will do.
TOKENIZER = Path(__file__).parents[2] / "stage_configs/spoken_sums"


def run(program: str, *args: str) -> None:
    """Run a program of this environment.

    Raises:
        AssertionError: it failed.
    """
    command = [str(Path(sys.executable).with_name(program)), *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.client("guidellm")
def test_streamed_chats_are_measured_by_guidellm(url: str, tmp_path: Path) -> None:
    prompts, report = tmp_path / "prompts.txt", tmp_path / "report.json"
    prompts.write_text("\n".join(PROMPTS), "utf-8")
    target = url.removesuffix("/v1")
    run(
        "guidellm", "run",
        "--backend", f"kind=openai_http,target={target},model=chat",
        "--profile", "kind=concurrent,streams=2",
        "--data", f"kind=text_file,path={prompts}",
        "--output", f"kind=json,path={report}",
        "--disable-progress",
    )  # fmt: skip
    (measured,) = json.loads(report.read_text("utf-8"))["benchmarks"]
    requests: dict[str, Any] = measured["requests"]
    assert len(requests["successful"]) == len(PROMPTS)
    assert not requests["errored"] and not requests["incomplete"]


@pytest.mark.client("aiperf")
def test_streamed_chats_are_measured_by_aiperf(url: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"text": prompt}) for prompt in PROMPTS), "utf-8")
    run(
        "aiperf", "profile",
        "--model", "chat",
        "--url", url.removesuffix("/v1"),
        "--endpoint-type", "chat",
        "--streaming",
        "--input-file", str(prompts),
        "--custom-dataset-type", "single_turn",
        "--tokenizer", str(TOKENIZER),
        "--request-count", "8",
        "--concurrency", "2",
        "--ui", "none",
        "--artifact-dir", str(tmp_path / "report"),
    )  # fmt: skip
    report = json.loads((tmp_path / "report/profile_export_aiperf.json").read_text("utf-8"))
    assert report["request_count"]["avg"] == 8
    assert report["time_to_first_token"]["avg"] > 0 and not report.get("error_request_count")
