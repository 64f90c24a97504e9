"""Writing ``outputs.jsonl``: the order, the fields, and file names that stay where they belong."""

from __future__ import annotations

import json
import math
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from engine import FinishReason, RequestMetrics, TokenLogprobs, Waveform
from engine.media.wav_file import read_wav
from omni.requests.output_writer import OutputWriter, file_name
from omni.requests.request import OmniOutput
from stages import StageOutput

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


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "outputs.jsonl").read_text("utf-8").splitlines()]


def test_a_text_stage_has_the_fields_that_apply_and_no_others(tmp_path: Path) -> None:
    with OutputWriter(tmp_path / "new/folder", FINAL) as writer:
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
    with OutputWriter(tmp_path, FINAL) as writer:
        writer.write(0, OmniOutput("r", {"writer": stage}, finished=True))
    assert lines(tmp_path)[0]["stages"]["writer"]["encoder_prompt_token_ids"] == [0, 7, 2]


def test_tensors_come_back_from_the_files_that_the_line_names(tmp_path: Path) -> None:
    tensors = {
        "hidden_states": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
        "pooled": torch.arange(8, dtype=torch.bfloat16)[::2],
    }
    with OutputWriter(tmp_path, FINAL) as writer:
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


def test_a_sound_comes_back_from_the_file_that_the_line_names(tmp_path: Path) -> None:
    samples = torch.linspace(-1.0, 1.0, 101)
    stage = StageOutput("r/1", "Voice", True, audio=Waveform(samples, 24_000))
    with OutputWriter(tmp_path, {"Voice": ("audio",)}) as writer:
        writer.write(0, OmniOutput("r/1", {"Voice": stage}, finished=True))
    (line,) = lines(tmp_path)
    file = line["stages"]["Voice"]["audio"]
    assert file == f"audio/{file_name('r/1')}/{file_name('Voice')}.wav"
    heard, rate = read_wav(tmp_path / file, longest_s=1.0)
    assert rate == 24_000
    torch.testing.assert_close(torch.from_numpy(heard), samples, atol=2**-14, rtol=0)
    assert not list(tmp_path.rglob("*.partial"))


def test_no_sound_is_a_file_without_samples(tmp_path: Path) -> None:
    stage = StageOutput("r", "voice", True, audio=Waveform(torch.zeros(0), 24_000))
    with OutputWriter(tmp_path, {"voice": ("audio",)}) as writer:
        writer.write(0, OmniOutput("r", {"voice": stage}, finished=True))
    with wave.open(str(tmp_path / "audio/r/voice.wav")) as file:
        assert (file.getnframes(), file.getframerate()) == (0, 24_000)


def test_a_sound_that_is_not_wanted_is_not_written(tmp_path: Path) -> None:
    stage = StageOutput("r", "writer", True, text="x", audio=Waveform(torch.zeros(3), 24_000))
    with OutputWriter(tmp_path, FINAL) as writer:
        writer.write(0, OmniOutput("r", {"writer": stage}, finished=True))
    assert "audio" not in lines(tmp_path)[0]["stages"]["writer"]
    assert not (tmp_path / "audio").exists()


def test_stages_that_are_not_final_do_not_appear(tmp_path: Path) -> None:
    output = tensor_output("r", {"pooled": torch.zeros(2)})
    with OutputWriter(tmp_path, {"writer": ("text",)}) as writer:
        writer.write(0, output)
    assert lines(tmp_path)[0]["stages"] == {}
    assert not (tmp_path / "tensors").exists()


def test_a_failed_request_has_its_line_with_its_error(tmp_path: Path) -> None:
    with OutputWriter(tmp_path, FINAL) as writer:
        writer.write(0, OmniOutput("bad", {}, finished=True, error="too long"))
        writer.write(1, text_output("good"))
    bad, good = lines(tmp_path)
    assert bad == {"request_id": "bad", "error": "too long", "stages": {}}
    assert good["error"] is None


@given(order=st.permutations(range(5)))
def test_lines_stand_in_the_requests_order_and_as_early_as_they_can(
    order: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("out")
    done: set[int] = set()
    with OutputWriter(folder, FINAL) as writer:
        for position in order:
            writer.write(position, text_output(f"r{position}"))
            done.add(position)
            prefix = next(number for number in range(6) if number not in done)
            assert [line["request_id"] for line in lines(folder)] == [
                f"r{number}" for number in range(prefix)
            ]


def test_what_waits_for_a_request_that_never_ends_is_written_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), OutputWriter(tmp_path, FINAL) as writer:
        writer.write(2, text_output("c"))
        writer.write(1, text_output("b"))
        raise KeyboardInterrupt
    assert [line["request_id"] for line in lines(tmp_path)] == ["b", "c"]


@pytest.mark.parametrize("first", [0, 1])
def test_a_position_is_written_once(first: int, tmp_path: Path) -> None:
    with OutputWriter(tmp_path, FINAL) as writer:
        writer.write(first, text_output("a"))
        with pytest.raises(ValueError, match=f"position {first}"):
            writer.write(first, text_output("b"))


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
        completions=(("a", (1,), FinishReason.STOP), ("b", (2,), FinishReason.LENGTH)),
    )
    with OutputWriter(tmp_path, FINAL) as writer:
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
    with OutputWriter(folder, FINAL) as writer:
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


def test_a_run_replaces_the_lines_of_the_one_before(tmp_path: Path) -> None:
    for request_id in ("old", "new"):
        with OutputWriter(tmp_path, FINAL) as writer:
            writer.write(0, text_output(request_id))
    assert [line["request_id"] for line in lines(tmp_path)] == ["new"]
