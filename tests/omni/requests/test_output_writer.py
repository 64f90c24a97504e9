"""Writing outputs: when and in which order, the fields, and file names that stay inside."""

from __future__ import annotations

import json
import math
import os
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from engine import FinishReason, RequestMetrics, TokenLogprobs, Waveform
from engine.media.media_source import MediaSource
from engine.media.sound_file import LongestSound, read_sound
from omni.requests.output_writer import OutputWriter, RunRecord, file_name
from omni.requests.request import OmniOutput
from stages import Completion, StageOutput

FINAL = {"writer": ("text",), "encoder": ("tensors",)}


def text_output(request_id: str, text: str = "hello") -> OmniOutput:
    stage = StageOutput(
        request_id,
        "writer",
        finished=True,
        text=text,
        token_ids=(5, 6),
        finish_reason=FinishReason.LENGTH,
        num_prompt_tokens=4,
        num_cached_tokens=2,
        tensors={"hidden_states": torch.zeros(5, 2)},
        metrics=RequestMetrics(queue_s=0.5, total_s=1.5),
    )
    return OmniOutput(request_id, {"writer": stage}, finished=True)


def tensor_output(request_id: str, tensors: dict[str, torch.Tensor]) -> OmniOutput:
    stage = StageOutput(request_id, "encoder", finished=True, num_prompt_tokens=3, tensors=tensors)
    return OmniOutput(request_id, {"encoder": stage}, finished=True)


class Written:
    """A run of some requests into a folder, finished when all of them are written."""

    def __init__(self, folder: Path, final: dict[str, tuple[str, ...]], number: int = 1) -> None:
        record = RunRecord(pipeline={"stages": {}}, requests="", num_requests=number)
        self._writer = OutputWriter(folder, final, record)

    def __enter__(self) -> OutputWriter:
        return self._writer

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._writer.finish()
        self._writer.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "outputs.jsonl").read_text("utf-8").splitlines()]


def test_a_text_stage_has_the_fields_that_apply_and_no_others(tmp_path: Path) -> None:
    with Written(tmp_path / "new/folder", FINAL) as writer:
        writer.write(0, text_output("r", "Grüße"))
    assert lines(tmp_path / "new/folder") == [
        {
            "request_id": "r",
            "error": None,
            "stages": {
                "writer": {
                    "text": "Grüße",
                    "token_ids": [5, 6],
                    "finish_reason": "length",
                    "num_prompt_tokens": 4,
                    "num_cached_tokens": 2,
                    "metrics": {"queue_s": 0.5, "total_s": 1.5, "num_preemptions": 0},
                }
            },
        }
    ]


def test_what_a_text_encoder_read_is_written(tmp_path: Path) -> None:
    stage = StageOutput("r", "writer", True, text="x", encoder_prompt_token_ids=(0, 7, 2))
    with Written(tmp_path, FINAL) as writer:
        writer.write(0, OmniOutput("r", {"writer": stage}, finished=True))
    assert lines(tmp_path)[0]["stages"]["writer"]["encoder_prompt_token_ids"] == [0, 7, 2]


def test_tensors_come_back_from_the_files_that_the_line_names(tmp_path: Path) -> None:
    tensors = {
        "hidden_states": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
        "pooled": torch.arange(8, dtype=torch.bfloat16)[::2],
    }
    with Written(tmp_path, FINAL) as writer:
        writer.write(0, tensor_output("r", tensors))
    (line,) = lines(tmp_path)
    stage = line["stages"]["encoder"]
    assert stage["tensors"] == {
        "hidden_states": "tensors/r/encoder.hidden_states.safetensors",
        "pooled": "tensors/r/encoder.pooled.safetensors",
    }
    assert not {"text", "token_ids"} & set(stage)
    for name, file in stage["tensors"].items():
        loaded = load_file(tmp_path / file)
        assert list(loaded) == [name]
        assert torch.equal(loaded[name], tensors[name])
        assert loaded[name].dtype == tensors[name].dtype
    assert not list(tmp_path.rglob("*.partial"))


def test_whoever_may_read_the_lines_may_read_the_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with Written(tmp_path, FINAL) as writer:
            writer.write(0, tensor_output("r", {"pooled": torch.zeros(2)}))
    finally:
        os.umask(before)
    modes = {file.stat().st_mode & 0o777 for file in tmp_path.rglob("*") if file.is_file()}
    assert modes == {0o640}


def test_a_sound_comes_back_from_the_file_that_the_line_names(tmp_path: Path) -> None:
    samples = torch.linspace(-1.0, 1.0, 101)
    stage = StageOutput("r/1", "Voice", True, audio=Waveform(samples, 24_000))
    with Written(tmp_path, {"Voice": ("audio",)}) as writer:
        writer.write(0, OmniOutput("r/1", {"Voice": stage}, finished=True))
    (line,) = lines(tmp_path)
    file = line["stages"]["Voice"]["audio"]
    assert file == f"audio/{file_name('r/1')}/{file_name('Voice')}.wav"
    heard, rate = read_sound(
        MediaSource(tmp_path / file, "audio", 2**20), longest=LongestSound(1.0)
    )
    assert rate == 24_000
    torch.testing.assert_close(torch.from_numpy(heard), samples, atol=2**-14, rtol=0)
    assert not list(tmp_path.rglob("*.partial"))


def test_no_sound_is_a_file_without_samples(tmp_path: Path) -> None:
    stage = StageOutput("r", "voice", True, audio=Waveform(torch.zeros(0), 24_000))
    with Written(tmp_path, {"voice": ("audio",)}) as writer:
        writer.write(0, OmniOutput("r", {"voice": stage}, finished=True))
    with wave.open(str(tmp_path / "audio/r/voice.wav")) as file:
        assert (file.getnframes(), file.getframerate()) == (0, 24_000)


def test_a_sound_that_is_not_wanted_is_not_written(tmp_path: Path) -> None:
    stage = StageOutput("r", "writer", True, text="x", audio=Waveform(torch.zeros(3), 24_000))
    with Written(tmp_path, FINAL) as writer:
        writer.write(0, OmniOutput("r", {"writer": stage}, finished=True))
    assert "audio" not in lines(tmp_path)[0]["stages"]["writer"]
    assert not (tmp_path / "audio").exists()


def test_stages_that_are_not_final_do_not_appear(tmp_path: Path) -> None:
    output = tensor_output("r", {"pooled": torch.zeros(2)})
    with Written(tmp_path, {"writer": ("text",)}) as writer:
        writer.write(0, output)
    assert lines(tmp_path)[0]["stages"] == {}
    assert not (tmp_path / "tensors").exists()


def test_a_failed_request_has_its_line_with_its_error(tmp_path: Path) -> None:
    with Written(tmp_path, FINAL, 2) as writer:
        writer.write(0, OmniOutput("bad", {}, finished=True, error="too long"))
        writer.write(1, text_output("good"))
    bad, good = lines(tmp_path)
    assert bad == {"request_id": "bad", "error": "too long", "stages": {}}
    assert good["error"] is None


def partial_lines(folder: Path) -> list[dict[str, Any]]:
    content = (folder / "outputs.partial.jsonl").read_bytes()
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


@given(order=st.permutations(range(5)))
def test_lines_come_at_once_and_stand_in_the_requests_order_in_the_end(
    order: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("out")
    with Written(folder, FINAL, 5) as writer:
        for count, position in enumerate(order, start=1):
            writer.write(position, text_output(f"r{position}"))
            written = partial_lines(folder)
            assert [line["position"] for line in written] == order[:count]
            assert [line["request_id"] for line in written] == [f"r{n}" for n in order[:count]]
            assert not (folder / "outputs.jsonl").exists()
    ordered = lines(folder)
    assert [line["request_id"] for line in ordered] == [f"r{number}" for number in range(5)]
    assert sorted(written, key=lambda line: line["position"]) == [
        {"position": number} | line for number, line in enumerate(ordered)
    ]
    assert {file.name for file in folder.iterdir()} == {"outputs.jsonl", "run.json"}


def test_what_was_done_before_an_interruption_stays(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Written(tmp_path, FINAL, 3) as writer:
        writer.write(2, text_output("c"))
        writer.write(1, text_output("b"))
        raise KeyboardInterrupt
    assert [line["request_id"] for line in partial_lines(tmp_path)] == ["c", "b"]
    assert not (tmp_path / "outputs.jsonl").exists()


def test_a_run_is_not_finished_before_all_is_done(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="1 of 2 requests are not done"),
        Written(tmp_path, FINAL, 2) as writer,
    ):
        writer.write(1, text_output("b"))
    assert [line["request_id"] for line in partial_lines(tmp_path)] == ["b"]


def test_a_sound_that_has_no_form_on_disk_fails_alone(tmp_path: Path) -> None:
    silent = Waveform(torch.tensor([0.0, math.nan]), 24_000)
    stage = StageOutput("r", "voice", True, audio=silent)
    with Written(tmp_path, {"voice": ("audio",)}, 2) as writer:
        error = writer.write(0, OmniOutput("r", {"voice": stage}, finished=True))
        writer.write(1, OmniOutput("s", {}, finished=True))
    bad, good = lines(tmp_path)
    assert bad["error"] == error
    assert "stage 'voice' cannot be written: a waveform must be" in bad["error"]
    assert good["error"] is None
    assert writer.num_failed == 1


def test_text_that_utf8_cannot_say_is_escaped(tmp_path: Path) -> None:
    """Such as the name of a file, in an error."""
    with Written(tmp_path, FINAL) as writer:
        writer.write(0, OmniOutput("r\udcff", {}, finished=True, error="no file '\udcfe'"))
    (line,) = lines(tmp_path)
    assert line["request_id"] == "r\\udcff"
    assert line["error"] == "no file '\\udcfe'"


@pytest.mark.parametrize("first", [0, 1])
def test_a_position_is_written_once(first: int, tmp_path: Path) -> None:
    with Written(tmp_path, FINAL, 2) as writer:
        writer.write(first, text_output("a"))
        with pytest.raises(ValueError, match=f"position {first} has been written"):
            writer.write(first, text_output("b"))
        for outside in (-1, 2):
            with pytest.raises(ValueError, match=f"position {outside} of 2"):
                writer.write(outside, text_output("b"))
        writer.write(1 - first, text_output("b"))


def test_logprobs_and_further_completions_are_written_when_they_were_asked_for(
    tmp_path: Path,
) -> None:
    stage = StageOutput(
        "r",
        "writer",
        finished=True,
        text="a",
        token_ids=(1,),
        finish_reason=FinishReason.STOP,
        logprobs=(TokenLogprobs(1, -0.5, ((1, -0.5), (2, -math.inf))),),
        completions=(
            Completion("a", (1,), FinishReason.STOP),
            Completion("b", (2,), FinishReason.LENGTH),
        ),
    )
    with Written(tmp_path, FINAL) as writer:
        writer.write(0, OmniOutput("r", {"writer": stage}, finished=True))
    written = lines(tmp_path)[0]["stages"]["writer"]
    assert written["logprobs"] == [{"token_id": 1, "logprob": -0.5, "top": [[1, -0.5], [2, None]]}]
    assert written["completions"] == [
        {"text": "a", "token_ids": [1], "finish_reason": "stop"},
        {"text": "b", "token_ids": [2], "finish_reason": "length"},
    ]


@pytest.mark.parametrize(
    "request_id",
    [
        "../../escape",
        "/etc/passwd",
        "..",
        ".",
        "a/b",
        "a\\b",
        "a\0b",
        "x" * 5000,
        "日本",
        "CON",
        " ",
    ],
)
def test_no_request_id_leads_out_of_the_folder(request_id: str, tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    with Written(folder, FINAL) as writer:
        writer.write(0, tensor_output(request_id, {"../../up": torch.zeros(2)}))
    (line,) = lines(folder)
    assert line["request_id"] == request_id
    (file,) = line["stages"]["encoder"]["tensors"].values()
    written = (folder / file).resolve()
    assert written.is_relative_to((folder / "tensors").resolve())
    assert torch.equal(load_file(written)["../../up"], torch.zeros(2))
    assert {path.name for path in tmp_path.iterdir()} == {"inside"}


@given(texts=st.sets(st.text(min_size=1), min_size=2, max_size=8))
def test_different_names_stay_different_even_where_case_is_ignored(texts: set[str]) -> None:
    names = [file_name(text) for text in texts]
    assert len({name.lower() for name in names}) == len(texts)
    assert all(len(name) <= 80 and name.isascii() for name in names)
    assert all("/" not in name and "." not in name for name in names)


def test_plain_names_stay_readable() -> None:
    assert file_name("line-12") == "line-12"
    assert file_name("My request/1").startswith("my_request_1~")
