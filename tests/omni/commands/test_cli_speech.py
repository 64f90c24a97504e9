"""``omni`` on pipelines with sound, images, video and speech."""

from __future__ import annotations

import json
import re
import wave
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from engine import (
    AudioPrompt,
    ChatPrompt,
    ExplicitEncoderDecoderPrompt,
    TextPrompt,
    VideoPrompt,
)
from omni.pipelines.pipeline_config import PipelineConfig
from omni.requests.request import OmniRequest
from omni.requests.request_file import RequestError, read_requests
from stages import AutoregressiveStageConfig, EncoderStageConfig
from tests.support.command_line import omni, read_outputs, write_requests
from tests.support.encoder_decoder_requests import tone, write_wav
from tests.support.published_layout import publish_on_hub
from tests.support.tables import rows
from tests.support.videos import moving_picture, video_file

SHORT = ["--set", "stages.thinker.sampling.max_tokens=12"]
SMALL = ("device=cpu", "dtype=float32", "max_model_len=512", "num_blocks=64")
HEARS_AND_SEES = "<|audio_bos|><|AUDIO|><|audio_eos|><|vision_bos|><|IMAGE|><|vision_eos|>What?"


@pytest.fixture(autouse=True)
def _checkpoints(checkpoint_cache: Path) -> None:
    """The seeded checkpoint is built once for all tests, and nothing outside is touched."""


@pytest.fixture
def shown(tmp_path: Path) -> list[str]:
    """Flags that show a sound and an image."""
    write_wav(tmp_path / "a.wav", tone(0.5))
    Image.new("RGB", (60, 40), "teal").save(tmp_path / "a.png")
    return ["--audio", str(tmp_path / "a.wav"), "--image", str(tmp_path / "a.png")]


def stages(folder: Path) -> list[dict[str, Any]]:
    return [line["stages"] for line in read_outputs(folder)]


def samples(file: Path) -> NDArray[np.int32]:
    with wave.open(str(file)) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (24_000, 1, 2)
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.int32)


def same(left: NDArray[np.int32], right: NDArray[np.int32]) -> bool:
    """Return True if two sounds are equal up to rounding of the last bit."""
    return left.shape == right.shape and bool((abs(left - right) <= 1).all())


def test_voice_and_image_become_text_and_sound(tmp_path: Path, shown: list[str]) -> None:
    heard = {}
    for speaker in ("Chelsie", "Ethan"):
        out = tmp_path / speaker
        omni("run", "omni_speech", "-p", HEARS_AND_SEES, *shown, *SHORT, "-o", out, "-q",
             "--speaker", speaker, status=0)  # fmt: skip
        (line,) = stages(out)
        assert line["thinker"]["text"] and line["thinker"]["num_prompt_tokens"] > 15
        assert set(line) == {"thinker", "code2wav"}, "no output of the talker is final"
        assert line["code2wav"]["audio"] == "audio/prompt-1/code2wav.wav"
        heard[speaker] = line["thinker"]["text"], samples(out / line["code2wav"]["audio"])
        num_codes = line["code2wav"]["num_prompt_tokens"]
        assert len(heard[speaker][1]) == 480 * num_codes > 0, "a code is 20 ms"
    (text, chelsie), (same_text, ethan) = heard.values()
    assert text == same_text
    assert not same(chelsie, ethan)


def test_a_line_may_name_its_own_speaker_and_a_wrong_one_fails_alone(tmp_path: Path) -> None:
    lines = [{"prompt": "Say it."} | voice for voice in (
        {}, {"speaker": "Chelsie"}, {"speaker": "Ethan"}, {"speaker": "Ehan"})]  # fmt: skip
    requests = write_requests(tmp_path, *lines)
    result = omni("run", "omni_speech", "-i", requests, *SHORT, "-o", tmp_path, "-q",
                  "--speaker", "Ethan", status=1)  # fmt: skip
    assert "did you mean 'Ethan'?" in result.stderr
    *spoken, failed = stages(tmp_path)
    assert failed == {}
    default, chelsie, ethan = (samples(tmp_path / each["code2wav"]["audio"]) for each in spoken)
    assert same(default, ethan), "the flag is the default of a line"
    assert not same(chelsie, ethan)


def test_a_chat_flag_equals_messages_of_a_request_file(tmp_path: Path, shown: list[str]) -> None:
    parts = [{"type": "image"}, {"type": "audio"}, {"type": "text", "text": "What?"}]
    files = {"images": ["a.png"], "audio": ["a.wav"]}
    lines = [
        {"prompt": [{"role": "user", "content": parts}], **files},
        {"prompt": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
         "<|vision_bos|><|IMAGE|><|vision_eos|><|audio_bos|><|AUDIO|><|audio_eos|>What?<|im_end|>\n"
         "<|im_start|>assistant\n", **files},
    ]  # fmt: skip
    requests = write_requests(tmp_path, *lines)
    made = []
    for flags in (["--input", requests], ["--chat", "What?", *shown]):
        out = tmp_path / "out"
        omni("run", "omni_speech", *flags, *SHORT, "-o", out, "-q", "--overwrite", status=0)
        for line in stages(out):
            reported = [line["thinker"][key] for key in ("token_ids", "num_prompt_tokens")]
            made.append((reported, samples(out / line["code2wav"]["audio"])))
    messages, by_hand, chat = made
    assert messages[0] == by_hand[0] == chat[0]
    assert same(messages[1], chat[1]) and same(by_hand[1], chat[1])


@pytest.mark.parametrize(
    ("name", "twins", "taken"),
    [
        ("qwen2_5_omni", "qwen2_5_omni", ("audio", "image")),
        ("qwen3_omni", "qwen3_omni", ("audio", "image")),
        ("csm", "csm", ()),
        ("pocket_tts", "pocket_tts pocket_tts_codec", ()),
        ("qwen2_5_vl", "qwen2_5_vl", ("image",)),
        ("qwen3_vl", "qwen3_vl", ("image",)),
        ("qwen3_5", "qwen3_5_vision", ("image",)),
        ("qwen3_asr", "qwen3_asr", ("audio",)),
        ("voxtral", "voxtral", ("audio",)),
    ],
)
def test_configs_of_published_checkpoints_run_those_of_the_hub(
    name: str,
    twins: str,
    taken: tuple[str, ...],
    seeded: Callable[[str], str],
    tmp_path: Path,
    shown: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small checkpoint in the published layout replaces the download."""
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    config = PipelineConfig.load(name)
    models = dict.fromkeys(stage.model for stage in config.stages.values())
    for twin, model in zip(twins.split(), models, strict=True):
        publish_on_hub(seeded(twin), hub, model)
    vocoder = next((each for each, stage in config.stages.items() if stage.kind == "generator"), "")
    changes = [f"stages.{vocoder}.generation.num_steps=3"] if name == "qwen2_5_omni" else []
    for stage, each in config.stages.items():
        if each.kind == "autoregressive":
            changes.append(f"stages.{stage}.sampling.max_tokens=8")
            changes += [f"stages.{stage}.engine.{change}" for change in SMALL]
    flags = [flag for change in changes for flag in ("--set", change)]
    shown = [*shown[: 2 * ("audio" in taken)], *shown[2 : 2 + 2 * ("image" in taken)]]
    omni("run", name, "--chat", "What?", *shown, *flags, "-o", tmp_path, "-q", status=0)
    (line,) = stages(tmp_path)
    assert next(iter(line.values())).get("text") or name in ("csm", "pocket_tts")
    assert ("audio" in line.get(vocoder, {})) == bool(vocoder)


def test_the_length_of_the_sound_is_printed_without_an_output_folder() -> None:
    result = omni("run", "omni_speech", "-p", "Say it.", *SHORT, status=0)
    assert "--- code2wav\naudio: " in result.stdout
    assert "s, 24000 samples per second" in result.stdout


def test_verify_compares_the_sound_of_requests_with_media(shown: list[str]) -> None:
    chats = ("--chat", "What?", "--chat", "Why?")
    result = omni("verify", "omni_speech", *chats, *shown, *SHORT, status=0)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("cached equals uncached: 2 of 2")
    assert any(line.startswith("  waveform: largest difference") for line in lines)
    thinker, talker, code2wav = (
        lines[place : place + 2] for place, line in enumerate(lines) if line.startswith("stage ")
    )
    for cached in (thinker, talker):
        assert " hits " in cached[0] and cached[1].endswith(" saved")
    assert code2wav[0].startswith("stage 'code2wav': ")
    assert code2wav[0].endswith("input tokens, no cache of its own: computed again in every run")
    assert code2wav[1].endswith(" warm"), "and it saves nothing"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    rows("""
        omni_speech --speaker Ehan | did you mean 'Ethan'?
        two_step --speaker Ethan | none of the stages
        omni_speech --set stages.talker.part=talkr | 'talker'
        omni_speech --set stages.thinker.part=null | thinker
        """),
)
def test_an_unknown_speaker_or_part_is_reported_before_anything_runs(
    arguments: str, expected: str
) -> None:
    result = omni("run", *arguments.split(), "-p", "x", status=2)
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        ("omni_speech -p x --speaker Bob", "'Bob': stage 'talker' has no such voice; known are "),
        ("omni_speech --audio no.wav", "--audio: 'no.wav' cannot be read: No such file"),
        ("omni_speech -p x --image no.png", "--image: 'no.png' cannot be read: No such file"),
        ("omni_speech --audio text.wav", "--audio: 'text.wav' cannot be read: it is none of WAV"),
        ("omni_speech --audio empty.wav", "--audio: 'empty.wav' cannot be read: it is none of"),
        ("omni_speech --audio broken.wav", "--audio: 'broken.wav' is no WAV file that can be read"),
        ("omni_speech -p x --image text.wav", "--image: 'text.wav' cannot be read: it is none of "),
        ("omni_speech -p x --video text.wav", "--video: 'text.wav' cannot be read: it is neither"),
        ("two_step --audio tone.wav", "--audio: stage 'writer' takes no audio; its model reads t"),
        ("two_step --chat x --image a.png", "--image: stage 'writer' takes no image; its model "),
        ("encode_then_generate --audio tone.wav", "--audio: stage 'encoder' takes no audio; its "),
    ],
)
@pytest.mark.parametrize("command", ["run", "verify"])
def test_missing_or_unsupported_files_are_refused_before_models_are_loaded(
    command: str, flags: str, reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(AutoregressiveStageConfig, "build_stage", load)
    monkeypatch.setattr(EncoderStageConfig, "build_stage", load)
    monkeypatch.chdir(tmp_path)
    Path("text.wav").write_text("no sound at all\n")
    Path("empty.wav").touch()
    Path("broken.wav").write_bytes(b"RIFF\x04\0\0\0WAVE")
    write_wav(Path("tone.wav"), tone(0.2))
    result = omni(command, *flags.split(), status=2)
    assert result.stderr.startswith("error: ") and reported in result.stderr
    assert "failed" not in result.stderr, "no summary"


RATE = 48_000
SOUND = (0.4 * np.sin(np.arange(RATE) / 17)).astype(np.float32)


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "clip.mp4"
    path.write_bytes(video_file("mp4", moving_picture(8, (56, 56)), 8, SOUND))
    return path


def read(tmp_path: Path, line: dict[str, Any]) -> OmniRequest:
    (found,) = read_requests(write_requests(tmp_path, line), {"s": None})
    assert isinstance(found, OmniRequest), found
    return found


def test_a_video_by_flag_equals_a_video_by_line(clip: Path, tmp_path: Path) -> None:
    content = [{"type": "video"}, {"type": "text", "text": "What is it?"}]
    said = [{"role": "user", "content": content}]
    url = {"url": f"data:video/mp4;base64,{b64encode(clip.read_bytes()).decode()}"}
    own = [{"type": "video_url", "video_url": url}, content[1]]
    mute = {"file": "clip.mp4", "use_audio": False}
    requests = write_requests(
        tmp_path,
        {"request_id": "listed", "messages": said, "videos": ["clip.mp4"]},
        {"request_id": "own", "messages": [{"role": "user", "content": own}]},
        {"request_id": "mute", "prompt": said, "videos": [mute]},
        {"request_id": "bad", "messages": said, "videos": ["requests.jsonl"]},
    )
    run = ["run", "omni_speech", "-q", "--set", "stages.thinker.sampling.max_tokens=6"]
    omni(*run, "-i", requests, "-o", tmp_path / "out", status=1)
    listed, owned, muted, bad = read_outputs(tmp_path / "out")
    assert "it is neither mp4 nor webm" in bad["error"]
    ids = listed["stages"]["thinker"]["token_ids"]
    assert owned["stages"]["thinker"]["token_ids"] == ids
    lengths = [each["stages"]["thinker"]["num_prompt_tokens"] for each in (listed, owned, muted)]
    # A second of sound and its two delimiters.
    assert lengths[0] == lengths[1] == lengths[2] + 25 + 2
    omni(*run, "--chat", "What is it?", "--video", clip, "-o", tmp_path / "flag", status=0)
    (line,) = read_outputs(tmp_path / "flag")
    assert line["stages"]["thinker"]["token_ids"] == ids


def test_videos_are_in_the_order_of_their_parts(clip: Path, tmp_path: Path) -> None:
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


def test_lists_of_files_may_have_data_urls(tmp_path: Path) -> None:
    url = "data:audio/wav;base64,AAAA"
    shown = {"images": [url], "audio": [{"file": url}], "videos": [url]}
    prompt = read(tmp_path, {"prompt": "a"} | shown).prompt
    assert isinstance(prompt, TextPrompt)
    assert prompt.multi_modal_data == {"image": [url], "audio": [url], "video": [VideoPrompt(url)]}
    alone = read(tmp_path, {"audio": [url]}).prompt
    assert isinstance(alone, ExplicitEncoderDecoderPrompt)
    assert isinstance(alone.encoder_prompt, AudioPrompt) and alone.encoder_prompt.audio == url


WRONG = rows("""
{"videos": ["clip.mp4"]} | videos: must stand beside one of prompt, messages
{"prompt_embeds": "e.safetensors", "videos": ["clip.mp4"]} | videos: must stand beside one of
{"prompt": "a", "videos": ["no.mp4"]} | videos: .*no.mp4' cannot be read: No such
{"messages": [{"role": "user", "content": [FETCHED]}]} | video_url: .* is in the network
{"prompt": "a", "videos": [{"file": "clip.mp4", "fps": 2}]} | fps
""")
FETCHED = '{"type": "video_url", "video_url": "https://example.org/a.mp4"}'


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_a_wrong_line_has_its_error(clip: Path, tmp_path: Path, line: str, message: str) -> None:
    asked = json.loads(line.replace("FETCHED", FETCHED))
    (found,) = read_requests(write_requests(tmp_path, asked), {"s": None})
    assert isinstance(found, RequestError)
    assert re.search(message, found.message), found.message


def test_a_video_without_a_prompt_is_refused(clip: Path) -> None:
    result = omni("run", "omni_speech", "--video", clip, status=2)
    assert "--video stands beside --chat or --prompt only" in result.stderr
