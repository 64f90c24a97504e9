"""``omni run`` and ``omni serve`` answer a request alike, for every family."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command_line import omni, read_outputs, write_requests
from tests.support.http_call import call
from tests.support.live_server import LiveServer
from tests.support.media_requests import picture, sound
from tests.support.model_trial import TRIALS

PICTURE = f"data:image/png;base64,{b64encode(picture()).decode()}"
SOUND = f"data:audio/wav;base64,{b64encode(sound()).decode()}"
SAYS: Mapping[str, Any] = {"prompt": "the quick brown fox"}
SHOWS = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": PICTURE}},
                {"type": "text", "text": "Where?"},
            ],
        }
    ]
}
HEARS: Mapping[str, Any] = {"audio": [SOUND]}
SPEAKS = {"messages": [{"role": "user", "content": "the quick brown fox"}]}
# By the name of a seeded checkpoint, which answers in one stage, or of a shipped pipeline.
ASKED: Mapping[str, Any] = {
    **dict.fromkeys((name for name, each in TRIALS.items() if each.seeded == name), SAYS),
    **dict.fromkeys(("llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vision"), SHOWS),
    "gemma3_vision": SHOWS,
    **dict.fromkeys(("qwen3_asr", "voxtral", "whisper"), HEARS),
    "mllama": {"images": [PICTURE]},
    "omni_speech": SHOWS,
    "qwen3_omni_seeded": SHOWS,
    **dict.fromkeys(("csm_seeded", "pocket_tts_seeded"), SPEAKS),
}


@pytest.mark.parametrize("name", sorted(set(ASKED) - {"bert", "csm", "pocket_tts"}))
def test_every_family_is_run_and_served(name: str, checkpoint_cache: Path, tmp_path: Path) -> None:
    short = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0}
    line = {**ASKED[name], "sampling": short}
    config = name
    if name in TRIALS or name == "gemma3_vision":
        stage = {"kind": "autoregressive", "model": f"seeded:{name}", "final_output": "text"}
        stages = {"it": stage | {"engine": {"num_blocks": 64}}}
        (tmp_path / "it.yaml").write_text(yaml.safe_dump({"name": name, "stages": stages}))
        config = str(tmp_path / "it.yaml")
    requests = write_requests(tmp_path, line)
    omni("run", config, "--input", requests, "-o", tmp_path / "out", "-q", status=0)
    (ran,) = read_outputs(tmp_path / "out")
    with LiveServer([config]) as server:
        url = f"{server.url}/v1/pipelines/{name}"
        status, _, content = call(url, json.dumps(line).encode())
    assert status == 200, content
    served = json.loads(content)
    assert set(ran["stages"]) == set(served["stages"])
    for stage, said in ran["stages"].items():
        assert said.get("token_ids") == served["stages"][stage].get("token_ids")
        assert said.get("text") == served["stages"][stage].get("text")
        assert ("audio" in said) == ("audio" in served["stages"][stage])
        assert said.get("token_ids") or "audio" in said
