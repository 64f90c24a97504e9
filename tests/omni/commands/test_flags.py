"""Flags of every command, and flags that change sampling; with small real models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine import AudioPrompt, ChatPrompt, ExplicitEncoderDecoderPrompt, TextPrompt, native
from omni.commands.explanation import draw_placement
from omni.commands.options import PromptFlags, RuntimeFlags
from omni.pipelines.pipeline_config import PipelineConfig
from tests.support.command_line import omni, read_outputs, write_requests
from tests.support.tables import rows


@pytest.fixture(autouse=True)
def _checkpoints(checkpoint_cache: Path) -> None:
    """``seeded:`` models are built once for all tests."""


def stages_of(folder: Path) -> list[dict[str, Any]]:
    lines = read_outputs(folder)
    assert [line["error"] for line in lines] == [None] * len(lines)
    return [line["stages"] for line in lines]


def test_max_tokens_and_temperature_are_defaults_for_every_stage(
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
    omni("run", "two_step", "-i", requests, "-o", tmp_path / "out", *flags, status=0)
    said = [
        [len(stage["token_ids"]) for stage in stages.values()]
        for stages in stages_of(tmp_path / "out")
    ]
    assert said == [[3, 3], [5, 5], [3, 2]]
    first, second, third = stages_of(tmp_path / "out")
    assert first["writer"]["token_ids"] == second["writer"]["token_ids"][:3], "all are greedy"
    assert first["writer"]["token_ids"] == third["writer"]["token_ids"]


@pytest.mark.parametrize(
    ("flags", "printed"),
    rows("""
        --max-tokens -1 | --max-tokens -1: stage 'writer': max_tokens: should be greater
        --temperature -0.5 | --temperature -0.5: stage 'writer': temperature: should be
        --temperature nan | --temperature nan: stage 'writer': temperature: should be
        --max-tokens 1 --set MIN | --max-tokens 1: stage 'reader': min_tokens (3) is larger than max
        --max-tokens x | --max-tokens
        """),
)
@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_wrong_value_names_its_flag(command: str, flags: str, printed: str) -> None:
    words = flags.replace("MIN", "stages.reader.sampling.min_tokens=3").split()
    assert printed in omni(command, "two_step", "-p", "x", *words, status=2).stderr


def test_sampling_flags_need_a_stage_that_samples(tmp_path: Path) -> None:
    pipeline = tmp_path / "embed.yaml"
    pipeline.write_text(
        "name: embed\nstages:\n  e: {kind: encoder, model: 'seeded:bert', final_output: tensors}\n"
    )
    result = omni("run", pipeline, "-p", "x", "--max-tokens", "3", "--temperature", "0", status=2)
    printed = "--max-tokens 3 --temperature 0.0: no stage of the pipeline 'embed' samples"
    assert printed in result.stderr


def test_a_speaker_without_a_name_is_refused() -> None:
    result = omni("run", "omni_speech", "--chat", "x", "--speaker", "", status=2)
    assert "--speaker must not be empty" in result.stderr


def test_the_kernels_in_use_are_logged_with_v() -> None:
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
        result = omni("run", "two_step", "-p", "x", "--max-tokens", "1", *flags, status=0)
    finally:
        native._load_once.cache_clear()
    printed = (
        "warning: no native kernels, torch does their work, more slowly: "
        "there is no C compiler (gcc, cc, clang)\n"
    )
    assert result.stderr.count(printed) == (0 if flags else 1)
    assert "Traceback" not in result.output


def test_an_unavailable_backend_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMNI_NATIVE", "0")
    backend = "stages.writer.engine.attention_backend=native"
    result = omni("run", "two_step", "-p", "x", "--set", backend, status=2)
    assert (
        "error: stage 'writer': the native backend cannot run here: native kernels are turned off "
        "by OMNI_NATIVE=0" in result.stderr
    )


def test_a_cache_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OMNI_CACHE_DIR", str(tmp_path / "file"))
    result = omni("run", "two_step", "-p", "x", status=2)
    assert result.stderr.startswith("error: stage 'writer': model: the cache ")
    assert "pydantic" not in result.stderr
    with pytest.raises(ValueError, match="stage 'writer': model: the cache"):
        PipelineConfig.load("two_step").resolved("writer")


SOUND, IMAGES = (Path("a.wav"), Path("b.wav")), (Path("a.png"), Path("b.png"))
SHOWN = {"image": IMAGES, "audio": SOUND}


@pytest.mark.parametrize(
    ("flags", "prompts"),
    [
        ({"prompts": ["a", "b"]}, ["a", "b"]),
        (
            {"encoder_prompts": ["a", "b"], "decoder_prompt": "c"},
            [ExplicitEncoderDecoderPrompt(text, "c") for text in "ab"],
        ),
        (
            {"prompts": ["x", "y"], "images": IMAGES},
            [TextPrompt(text, multi_modal_data={"image": IMAGES}) for text in "xy"],
        ),
        (
            {"prompts": ["x", "y"], "images": IMAGES, "audio": SOUND},
            [TextPrompt(text, multi_modal_data=SHOWN) for text in "xy"],
        ),
        (
            {"chats": ["x", "y"]},
            [ChatPrompt(({"role": "user", "content": text},)) for text in "xy"],
        ),
    ],
)
def test_every_prompt_is_a_request_with_all_files(
    flags: dict[str, Any], prompts: list[Any]
) -> None:
    no_flags: dict[str, Any] = {
        name: None if isinstance(given, str) else [] for name, given in flags.items()
    }
    assert not PromptFlags(**no_flags).given and PromptFlags(**flags).given
    requests = PromptFlags(**flags).requests()
    assert [request.prompt for request in requests] == prompts
    assert [request.request_id for request in requests][:2] == ["prompt-1", "prompt-2"][
        : len(prompts)
    ]


def test_audio_has_its_language() -> None:
    (request,) = PromptFlags(audio=[Path("a.wav")], language="fr").requests()
    prompt = request.prompt
    assert isinstance(prompt, ExplicitEncoderDecoderPrompt)
    assert prompt.decoder_prompt is None
    audio = prompt.encoder_prompt
    assert isinstance(audio, AudioPrompt)
    assert (audio.audio, audio.language) == (Path("a.wav"), "fr")


def test_every_chat_begins_with_the_images_and_then_the_sound() -> None:
    requests = PromptFlags(chats=["x", "y"], audio=SOUND, images=IMAGES).requests()
    kinds = ["image", "image", "audio", "audio", "text"]
    for text, request in zip("xy", requests, strict=True):
        prompt = request.prompt
        assert isinstance(prompt, ChatPrompt)
        (message,) = prompt.messages
        assert [part["type"] for part in message["content"]] == kinds
        assert message["role"] == "user" and message["content"][-1]["text"] == text
        assert prompt.multi_modal_data == SHOWN


@pytest.mark.parametrize(
    ("given", "expected"),
    rows("""
        chats prompts | --chat and --prompt do not go together
        chats decoder_prompt | --decoder-prompt stands beside
        chats audio language | --language stands beside --audio only, without --chat
        decoder_prompt | --decoder-prompt stands beside
        prompts decoder_prompt | --decoder-prompt stands beside
        prompts encoder_prompts decoder_prompt | --decoder-prompt stands beside
        images | --image stands beside --chat or --prompt
        prompts language | --language stands beside --audio
        encoder_prompts language | --language stands beside --audio
        prompts audio language | --language stands beside --audio only
        """),
)
def test_a_flag_without_the_flag_that_it_needs_is_an_error(given: str, expected: str) -> None:
    single = {"decoder_prompt": "x", "language": "en"}
    files: dict[str, Any] = {"audio": [Path("a.wav")], "images": [Path("a.png")]}
    flags = {name: (single | files).get(name, ["a"]) for name in given.split()}
    assert PromptFlags(**flags).given
    with pytest.raises(ValueError, match=expected):
        PromptFlags(**flags).requests()


def explained(*words: str) -> str:
    result = omni("explain", "omni_speech", "--no-load", *words, COLUMNS="200", status=0)
    return re.sub(r"\d[\d.]* \w+ free", "", result.stdout)  # which varies


def settings(printed: str) -> dict[str, object]:
    read: dict[str, object] = yaml.safe_load(printed.split("Every setting:")[1])
    return read


def test_a_flag_equals_its_setting() -> None:
    by_flag = explained("--runtime", "ray", "--address", "head:6379")
    by_place = explained("--set", "runtime.kind=ray", "--set", "runtime.address=head:6379")
    assert by_flag == by_place
    assert settings(by_flag)["runtime"] == {
        "kind": "ray",
        "address": "head:6379",
        "tensor_transport": "object_store",
        "max_retries": 1,
        "stall_timeout_s": 120.0,
    }
    assert RuntimeFlags().runtime_overrides == {}


def test_an_unknown_runtime_is_reported_with_its_flag() -> None:
    for command in ("validate", "explain", "run", "verify", "serve"):
        result = omni(command, "two_step", "--runtime", "process", COLUMNS="200", status=2)
        assert result.stderr == (
            "error: --runtime: runtime.kind: unknown runtime 'process'; did you mean 'processes'?\n"
        )


def test_an_address_needs_a_cluster() -> None:
    flags = ("--runtime", "processes", "--address", "head:1")
    result = omni("validate", "two_step", *flags, COLUMNS="200", status=2)
    assert result.stderr.startswith("error: --address: runtime.address: 'head:1' is for a Ray ")


def test_a_flag_overrides_a_setting() -> None:
    printed = explained("--runtime", "processes", "--set", "runtime.kind=inline")
    assert "Where the stages run (processes" in printed


def drawn(cores: int = 4, **overrides: object) -> str:
    return draw_placement(PipelineConfig.load("omni_speech", overrides), cores)


def test_each_stage_has_a_box_with_its_workers_and_inputs() -> None:
    overrides = {
        "runtime.kind": "processes",
        "stages.thinker.placement.threads": None,
        "stages.talker.placement.replicas": 2,
    }
    assert drawn(cores=5, **overrides).startswith(
        """\
Where the stages run (processes, 5 cores):

  ┌ this process ──────────────────────────────────────────────────────────┐
  │ takes requests, and hands on handles: what stages compute goes past it │
  └────────────────────────────────────────────────────────────────────────┘
  ┌ thinker ───────────────────────────┐
  │ 1 process of 2 threads, device cpu │
  │ ◄── prompt                         │
  └────────────────────────────────────┘
  ┌ talker ────────────────────────────────────────────────────────────────────┐
  │ 2 processes of 1 thread, device cpu                                        │
  │ ◄~~ thinker: a handle of shared memory, every 4 tokens; 2 of them may wait │
  └────────────────────────────────────────────────────────────────────────────┘
  ┌ code2wav ─"""
    )


def test_inline_all_stages_share_one_box() -> None:
    printed = drawn()
    assert printed.count("┌") == 1
    assert "thinker, 1 thread, device cpu" in printed
    assert "thinker, device cpu" in drawn(**{"stages.thinker.placement.threads": None})
    assert "◄~~ talker: its output, every 8 tokens; 2 of them may wait" in printed
    assert "Where the stages run (inline, 1 core):" in drawn(cores=1)


def test_resources_of_a_cluster_are_shown() -> None:
    printed = drawn(
        **{
            "runtime.kind": "ray",
            "runtime.address": "head:6379",
            "stages.thinker.placement": {"device": "cuda", "threads": 3},
            "stages.talker.placement": {
                "replicas": 2,
                "num_cpus": 0.5,
                "resources": {"disk": 1},
                "node": "10.0.0.7",
            },
        }
    )
    assert "┌ Ray cluster: head:6379 ─" in printed
    assert "│ 1 actor that reserves 3 CPU, 1 GPU, device cuda " in printed
    assert (
        "│ 2 actors that reserve 0.5 CPU, 0 GPU, 1 disk, on node 10.0.0.7, device cpu " in printed
    )
    assert "◄~~ talker: a reference into the object store, every 8 tokens; 2 of them" in printed


def test_devices_of_replicas_are_listed() -> None:
    printed = drawn(
        **{"runtime.kind": "processes", "stages.talker.placement.devices": ["cpu", "cuda:1"]}
    )
    assert "2 processes of 1 thread, cpu, cuda:1" in printed


def test_the_boxes_are_closed() -> None:
    for kind in ("inline", "processes", "ray"):
        lines = drawn(**{"runtime.kind": kind}).splitlines()[2:]
        open_widths: list[int] = []
        for line in (line.strip() for line in lines):
            inner = line.strip("│ ")
            if inner.startswith("┌"):
                open_widths.append(len(inner))
            elif inner.startswith("└"):
                assert len(inner) == open_widths.pop()
        assert open_widths == []


def test_stages_that_share_a_worker_share_a_box() -> None:
    shared = {f"stages.{name}.placement.worker": "voice" for name in ("talker", "code2wav")}
    overrides = {"runtime.kind": "processes", "stages.talker.placement.threads": 2}
    assert drawn(**shared, **overrides).endswith(
        """\
  ┌ voice: one process, its stages by turns ─────────────────────────────────────┐
  │ talker, 2 threads, device cpu                                                │
  │   ◄~~ thinker: a handle of shared memory, every 4 tokens; 2 of them may wait │
  │ code2wav, 1 thread, device cpu                                               │
  │   ◄~~ talker: a handle of shared memory, every 8 tokens; 2 of them may wait  │
  └──────────────────────────────────────────────────────────────────────────────┘"""
    )
