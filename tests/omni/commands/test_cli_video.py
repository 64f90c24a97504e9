"""Videos on the command line and in request files are the same as in Python."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from engine import (
    AudioPrompt,
    ChatPrompt,
    ExplicitEncoderDecoderPrompt,
    TextPrompt,
    VideoPrompt,
)
from omni.commands.cli import app
from omni.requests.request import OmniRequest
from omni.requests.request_file import RequestError, read_requests
from tests.support.videos import moving_picture, video_file

RATE = 48_000
SOUND = (0.4 * np.sin(np.arange(RATE) / 17)).astype(np.float32)


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "clip.mp4"
    path.write_bytes(video_file("mp4", moving_picture(8, (56, 56)), 8, SOUND))
    return path


def lines(tmp_path: Path, *requests: dict[str, Any]) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return path


def read(tmp_path: Path, line: dict[str, Any]) -> OmniRequest:
    (found,) = read_requests(lines(tmp_path, line), {"s": None})
    assert isinstance(found, OmniRequest), found
    return found


@pytest.mark.usefixtures("checkpoint_cache")
def test_a_video_is_seen_and_heard_alike_by_flag_and_by_line(clip: Path, tmp_path: Path) -> None:
    content = [{"type": "video"}, {"type": "text", "text": "What is it?"}]
    said = [{"role": "user", "content": content}]
    url = {"url": f"data:video/mp4;base64,{b64encode(clip.read_bytes()).decode()}"}
    own = [{"type": "video_url", "video_url": url}, content[1]]
    mute = {"file": "clip.mp4", "use_audio": False}
    requests = lines(
        tmp_path,
        {"request_id": "listed", "messages": said, "videos": ["clip.mp4"]},
        {"request_id": "own", "messages": [{"role": "user", "content": own}]},
        {
            "request_id": "mute",
            "prompt": said,
            "videos": [{"file": "clip.mp4", "use_audio": False}],
        },
        {"request_id": "bad", "messages": said, "videos": ["requests.jsonl"]},
    )
    run = ["run", "omni_speech", "-q", "--set", "stages.thinker.sampling.max_tokens=6"]
    result = CliRunner().invoke(app, [*run, "-i", str(requests), "-o", str(tmp_path / "out")])
    assert result.exit_code == 1, result.output
    written = (tmp_path / "out" / "outputs.jsonl").read_text().splitlines()
    listed, own, mute, bad = (json.loads(line) for line in written)
    assert "it is neither mp4 nor webm" in bad["error"]
    ids = listed["stages"]["thinker"]["token_ids"]
    assert own["stages"]["thinker"]["token_ids"] == ids
    lengths = [each["stages"]["thinker"]["num_prompt_tokens"] for each in (listed, own, mute)]
    # A second of sound, and what stands around it.
    assert lengths[0] == lengths[1] == lengths[2] + 25 + 2
    flags = ["--chat", "What is it?", "--video", str(clip), "-o", str(tmp_path / "flag")]
    result = CliRunner().invoke(app, [*run, *flags])
    assert result.exit_code == 0, result.output
    (line,) = (tmp_path / "flag" / "outputs.jsonl").read_text().splitlines()
    assert json.loads(line)["stages"]["thinker"]["token_ids"] == ids


DEAF = ("model=seeded:qwen2_5_vl", "engine.max_model_len=512", "engine.num_blocks=64")


@pytest.mark.usefixtures("checkpoint_cache")
def test_a_model_that_does_not_hear_sees_videos_alike_by_flag_and_by_line(
    clip: Path, tmp_path: Path
) -> None:
    text = {"type": "text", "text": "What is it?"}
    own = [{"type": "video_url", "video_url": {"url": "clip.mp4"}}, text]
    said = [{"role": "user", "content": [{"type": "video"}, text]}]
    requests = lines(
        tmp_path,
        {"request_id": "listed", "messages": said, "videos": ["clip.mp4"]},
        {"request_id": "own", "messages": [{"role": "user", "content": own}]},
        {"request_id": "blind", "messages": [{"role": "user", "content": [text]}]},
    )
    run = ["run", "qwen2_5_vl", "-q", "--max-tokens", "6"]
    run += [flag for change in DEAF for flag in ("--set", f"stages.describer.{change}")]
    flags = ["--chat", "What is it?", "--video", str(clip)]
    texts: list[str] = []
    for shown in (["-i", str(requests)], flags):
        folder = tmp_path / f"out{len(texts)}"
        result = CliRunner().invoke(app, [*run, *shown, "-o", str(folder)])
        assert result.exit_code == 0, result.output
        written = (folder / "outputs.jsonl").read_text().splitlines()
        texts += [json.loads(line)["stages"]["describer"]["text"] for line in written]
    listed, own_text, blind, flagged = texts
    assert listed == own_text == flagged != blind


@pytest.mark.usefixtures("checkpoint_cache")
def test_a_model_that_sees_pictures_only_refuses_a_video(clip: Path, tmp_path: Path) -> None:
    config = tmp_path / "pictures.yaml"
    config.write_text(
        "name: pictures\nstages:\n  eyes:\n    kind: autoregressive\n    model: seeded:llava\n"
        "    sampling: {max_tokens: 2}\n    outputs: []\n    final_output: text\n"
    )
    result = CliRunner().invoke(
        app, ["run", str(config), "-q", "--chat", "What is it?", "--video", str(clip)]
    )
    assert result.exit_code == 1, result.output
    assert "stage 'eyes': multi_modal_data has 'video'; what can be shown is 'image'" in (
        result.stderr
    )


def test_videos_stand_in_the_order_of_their_parts(clip: Path, tmp_path: Path) -> None:
    url = "data:video/webm;base64,AAAA"
    content = [{"type": "video"}, {"type": "video_url", "video_url": url}, {"type": "video"}]
    line = {"messages": [{"role": "user", "content": content}]}
    listed = ["clip.mp4", {"file": "clip.mp4", "use_audio": False}]
    prompt = read(tmp_path, line | {"videos": listed}).prompt
    assert isinstance(prompt, ChatPrompt)
    shown = prompt.multi_modal_data["video"]
    assert shown == [VideoPrompt(clip), url, VideoPrompt(clip, use_audio=False)]
    assert prompt.messages[0]["content"] == ({"type": "video"},) * 3
    prompt = read(tmp_path, {"prompt": "<|VIDEO|>", "videos": ["clip.mp4"]}).prompt
    assert isinstance(prompt, TextPrompt)
    assert prompt.multi_modal_data == {"video": [VideoPrompt(clip)]}


def test_data_urls_stand_in_lists_of_files(tmp_path: Path) -> None:
    url = "data:audio/wav;base64,AAAA"
    shown = {"images": [url], "audio": [{"file": url}], "videos": [url]}
    prompt = read(tmp_path, {"prompt": "a"} | shown).prompt
    assert isinstance(prompt, TextPrompt)
    assert prompt.multi_modal_data == {"image": [url], "audio": [url], "video": [VideoPrompt(url)]}
    alone = read(tmp_path, {"audio": [url]}).prompt
    assert isinstance(alone, ExplicitEncoderDecoderPrompt)
    assert isinstance(alone.encoder_prompt, AudioPrompt) and alone.encoder_prompt.audio == url


WRONG = {
    "alone": ({"videos": ["clip.mp4"]}, "videos: must stand beside one of prompt, messages"),
    "beside embeddings": (
        {"prompt_embeds": "e.safetensors", "videos": ["clip.mp4"]},
        "videos: must stand beside one of",
    ),
    "missing": ({"prompt": "a", "videos": ["no.mp4"]}, "videos: .*no.mp4' cannot be read: No such"),
    "fetched": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "video_url", "video_url": "https://example.org/a.mp4"}],
                }
            ]
        },
        "video_url: .* is in the network",
    ),
    "a wish": (
        {"prompt": "a", "videos": [{"file": "clip.mp4", "fps": 2}]},
        "fps",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line_says_so(clip: Path, tmp_path: Path, case: str) -> None:
    line, message = WRONG[case]
    (found,) = read_requests(lines(tmp_path, line), {"s": None})
    assert isinstance(found, RequestError)
    assert re.search(message, found.message), found.message


def test_a_video_alone_is_no_request(clip: Path) -> None:
    result = CliRunner().invoke(app, ["run", "omni_speech", "--video", str(clip)])
    assert result.exit_code == 2
    assert "--video stands beside --chat or --prompt only" in result.stderr
