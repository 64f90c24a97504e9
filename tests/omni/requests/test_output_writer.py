"""Writing outputs: order, fields, file names inside the folder, and resuming."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine import (
    FinishReason,
    RequestMetrics,
    TimedWord,
    TokenLogprobs,
    TranscriptionWindow,
    Waveform,
)
from engine.media.media_source import MediaSource
from engine.media.sound_file import LongestSound, read_sound
from omni.requests import output_writer
from omni.requests.output_writer import Existing, OutputWriter, RunRecord, file_name
from omni.requests.request import OmniOutput
from stages import Completion, StageOutput
from tests.support.import_graph import ROOT

FINAL: dict[str, tuple[str, ...]] = {"writer": ("text",), "encoder": ("tensors",)}


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


@contextmanager
def written_run(
    folder: Path, final: dict[str, tuple[str, ...]], number: int
) -> Iterator[OutputWriter]:
    """A run of some requests into a folder, finished at the end of the block."""
    record = RunRecord(pipeline={"stages": {}}, requests="", num_requests=number)
    with OutputWriter(folder, final, record) as writer:
        yield writer
        writer.finish()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "outputs.jsonl").read_text("utf-8").splitlines()]


def written(
    folder: Path, *outputs: OmniOutput, final: dict[str, tuple[str, ...]] = FINAL
) -> list[dict[str, Any]]:
    """The lines of a run whose outputs were written in order."""
    with written_run(folder, final, len(outputs)) as writer:
        for position, output in enumerate(outputs):
            writer.write(position, output)
    return lines(folder)


def one_stage(name: str, **fields: Any) -> OmniOutput:
    stage = StageOutput("r", name, finished=True, **fields)
    return OmniOutput("r", {name: stage}, finished=True)


def test_a_text_stage_has_the_fields_that_apply_and_no_others(tmp_path: Path) -> None:
    assert written(tmp_path / "new/folder", text_output("r", "Grüße")) == [
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


def test_tensors_are_read_back_from_the_files_that_the_line_names(tmp_path: Path) -> None:
    tensors = {
        "hidden_states": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
        "pooled": torch.arange(8, dtype=torch.bfloat16)[::2],
    }
    (line,) = written(tmp_path, tensor_output("r", tensors))
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


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        written(tmp_path, tensor_output("r", {"pooled": torch.zeros(2)}))
    finally:
        os.umask(before)
    modes = {file.stat().st_mode & 0o777 for file in tmp_path.rglob("*") if file.is_file()}
    assert modes == {0o640}


def test_sound_is_read_back_from_the_file_that_the_line_names(tmp_path: Path) -> None:
    samples = torch.linspace(-1.0, 1.0, 101)
    stage = StageOutput("r/1", "Voice", True, audio=Waveform(samples, 24_000))
    spoken = OmniOutput("r/1", {"Voice": stage}, finished=True)
    (line,) = written(tmp_path, spoken, final={"Voice": ("audio",)})
    file = line["stages"]["Voice"]["audio"]
    assert file == f"audio/{file_name('r/1')}/{file_name('Voice')}.wav"
    heard, rate = read_sound(
        MediaSource(tmp_path / file, "audio", 2**20), longest=LongestSound(1.0)
    )
    assert rate == 24_000
    torch.testing.assert_close(torch.from_numpy(heard), samples, atol=2**-14, rtol=0)
    assert not list(tmp_path.rglob("*.partial"))


def test_outputs_that_are_not_final_are_not_written(tmp_path: Path) -> None:
    spoken = one_stage("writer", text="x", audio=Waveform(torch.zeros(3), 24_000))
    encoded = tensor_output("s", {"pooled": torch.zeros(2)})
    first, second = written(tmp_path, spoken, encoded, final={"writer": ("text",)})
    assert "audio" not in first["stages"]["writer"] and second["stages"] == {}
    assert not (tmp_path / "audio").exists() and not (tmp_path / "tensors").exists()


def test_a_failed_request_has_its_line_with_its_error(tmp_path: Path) -> None:
    failed = OmniOutput("bad", {}, finished=True, error="too long")
    bad, good = written(tmp_path, failed, text_output("good"))
    assert bad == {"request_id": "bad", "error": "too long", "stages": {}}
    assert good["error"] is None


def partial_lines(folder: Path) -> list[dict[str, Any]]:
    content = (folder / "outputs.partial.jsonl").read_bytes()
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


@given(order=st.permutations(range(5)))
def test_lines_are_written_at_once_and_are_ordered_by_request_at_the_end(
    order: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("out")
    with written_run(folder, FINAL, 5) as writer:
        for count, position in enumerate(order, start=1):
            writer.write(position, text_output(f"r{position}"))
            done = partial_lines(folder)
            assert [line["position"] for line in done] == order[:count]
            assert [line["request_id"] for line in done] == [f"r{n}" for n in order[:count]]
            assert not (folder / "outputs.jsonl").exists()
    ordered = lines(folder)
    assert [line["request_id"] for line in ordered] == [f"r{number}" for number in range(5)]
    assert sorted(done, key=lambda line: line["position"]) == [
        {"position": number} | line for number, line in enumerate(ordered)
    ]
    assert {file.name for file in folder.iterdir()} == {"outputs.jsonl", "run.json"}


def test_a_run_with_missing_requests_cannot_be_finished(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="1 of 2 requests are not done"),
        written_run(tmp_path, FINAL, 2) as writer,
    ):
        writer.write(1, text_output("b"))
    assert [line["request_id"] for line in partial_lines(tmp_path)] == ["b"]


def test_a_sound_that_cannot_be_written_fails_only_its_request(tmp_path: Path) -> None:
    silent = Waveform(torch.tensor([0.0, math.nan]), 24_000)
    stage = StageOutput("r", "voice", True, audio=silent)
    with written_run(tmp_path, {"voice": ("audio",)}, 2) as writer:
        error = writer.write(0, OmniOutput("r", {"voice": stage}, finished=True))
        writer.write(1, OmniOutput("s", {}, finished=True))
    bad, good = lines(tmp_path)
    assert bad["error"] == error
    assert "stage 'voice' cannot be written: a waveform must be" in bad["error"]
    assert good["error"] is None
    assert writer.num_failed == 1


def test_text_that_utf8_cannot_encode_is_escaped(tmp_path: Path) -> None:
    """For example a file name in an error."""
    output = OmniOutput("r\udcff", {}, finished=True, error="no file '\udcfe'")
    (line,) = written(tmp_path, output)
    assert line["request_id"] == "r\\udcff"
    assert line["error"] == "no file '\\udcfe'"


@pytest.mark.parametrize("first", [0, 1])
def test_a_position_is_written_once(first: int, tmp_path: Path) -> None:
    with written_run(tmp_path, FINAL, 2) as writer:
        writer.write(first, text_output("a"))
        with pytest.raises(ValueError, match=f"position {first} has been written"):
            writer.write(first, text_output("b"))
        for outside in (-1, 2):
            with pytest.raises(ValueError, match=f"position {outside} of 2"):
                writer.write(outside, text_output("b"))
        writer.write(1 - first, text_output("b"))


def test_optional_fields_are_written_when_an_output_has_them(tmp_path: Path) -> None:
    output = one_stage(
        "writer",
        text="a",
        encoder_prompt_token_ids=(0, 7, 2),
        token_ids=(1,),
        finish_reason=FinishReason.STOP,
        logprobs=(TokenLogprobs(1, -0.5, ((1, -0.5), (2, -math.inf))),),
        completions=(
            Completion("a", (1,), FinishReason.STOP),
            Completion("b", (2,), FinishReason.LENGTH),
        ),
        windows=(
            TranscriptionWindow(0, 1.5, token_timestamps=(2.0,), words=(TimedWord("a", 1.5, 2.0),)),
        ),
    )
    line = written(tmp_path, output)[0]["stages"]["writer"]
    assert line["encoder_prompt_token_ids"] == [0, 7, 2]
    assert line["logprobs"] == [{"token_id": 1, "logprob": -0.5, "top": [[1, -0.5], [2, None]]}]
    assert line["completions"] == [
        {"text": "a", "token_ids": [1], "finish_reason": "stop"},
        {"text": "b", "token_ids": [2], "finish_reason": "length"},
    ]
    assert [(each["begin_s"], each["words"]) for each in line["windows"]] == [
        (1.5, [{"word": "a", "start": 1.5, "end": 2.0}])
    ]


@pytest.mark.parametrize(
    "request_id",
    [
        *("../../escape", "/etc/passwd", "..", ".", "a/b", "a\\b"),
        *("a\0b", "x" * 5000, "日本", "CON", " "),
    ],
)
def test_no_request_id_leads_out_of_the_folder(request_id: str, tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    (line,) = written(folder, tensor_output(request_id, {"../../up": torch.zeros(2)}))
    assert line["request_id"] == request_id
    (name,) = line["stages"]["encoder"]["tensors"].values()
    file = (folder / name).resolve()
    assert file.is_relative_to((folder / "tensors").resolve())
    assert torch.equal(load_file(file)["../../up"], torch.zeros(2))
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


RESUMED_FINAL = {"writer": ("text", "tensors"), "voice": ("audio",)}
PIPELINE = {"name": "p", "stages": {"writer": {"model": "m", "sampling": {"temperature": 0.0}}}}
NUMBER = 4
RECORD = RunRecord(pipeline=PIPELINE, requests="digest", num_requests=NUMBER)


def output(position: int) -> OmniOutput:
    request_id = f"r{position}"
    if position == 1:
        return OmniOutput(request_id, {}, finished=True, error="too long")
    writer = StageOutput(
        request_id,
        "writer",
        finished=True,
        text=f"text {position}\u2028\x85",
        token_ids=(position,),
        finish_reason=FinishReason.LENGTH,
        tensors={"rows": torch.full((2, 3), float(position))},
    )
    voice = StageOutput(
        request_id, "voice", finished=True, audio=Waveform(torch.zeros(position + 1), 8_000)
    )
    return OmniOutput(request_id, {"writer": writer, "voice": voice}, finished=True)


def opened(
    folder: Path, existing: Existing = Existing.REFUSE, record: RunRecord = RECORD
) -> OutputWriter:
    return OutputWriter(folder, RESUMED_FINAL, record, existing)


def write(folder: Path, *positions: int, existing: Existing = Existing.REFUSE) -> None:
    with opened(folder, existing) as writer:
        for position in positions:
            writer.write(position, output(position))
        if writer.num_done == NUMBER:
            writer.finish()


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    """The files of an undisturbed run."""
    write(tmp_path / "undisturbed", 3, 0, 1, 2)
    return content_of(tmp_path / "undisturbed")


@pytest.mark.parametrize("done", [(), (2,), (1, 3), (0, 1, 2), (3, 2, 1, 0)])
def test_a_resumed_run_ends_like_an_undisturbed_one(
    done: tuple[int, ...], whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    with opened(folder) as writer:
        for position in done:
            writer.write(position, output(position))
    with opened(folder, Existing.RESUME) as writer:
        assert (writer.num_done, writer.num_failed) == (len(done), int(1 in done))
        for position in range(NUMBER):
            assert writer.is_done(position) == (position in done)
            if position not in done:
                writer.write(position, output(position))
        writer.finish()
        assert writer.location == folder / "outputs.jsonl"
    assert content_of(folder) == whole


def test_resuming_a_finished_run_changes_nothing(whole: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "undisturbed"
    with opened(folder, Existing.RESUME) as writer:
        assert all(map(writer.is_done, range(NUMBER)))
        assert writer.num_failed == 1
        writer.finish()
    assert content_of(folder) == whole


@pytest.mark.parametrize("whole_run", [False, True])
def test_existing_outputs_are_refused_by_default(whole_run: bool, tmp_path: Path) -> None:
    write(tmp_path, *(range(NUMBER) if whole_run else [2]))
    before = content_of(tmp_path)
    with pytest.raises(ValueError, match="has the outputs of an earlier run.*--overwrite") as error:
        opened(tmp_path)
    assert ("--resume" in str(error.value)) is not whole_run
    assert content_of(tmp_path) == before


@pytest.mark.parametrize("whole_run", [False, True])
def test_existing_outputs_are_replaced_on_request(
    whole_run: bool, whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    other = RECORD.model_copy(update={"requests": "others"})
    with opened(folder, record=other) as writer:
        for position in range(NUMBER if whole_run else 1):
            writer.write(position, OmniOutput("old", {}, finished=True))
        if whole_run:
            writer.finish()
    before = content_of(folder)
    with opened(folder, Existing.OVERWRITE):
        pass
    assert content_of(folder) == before, "outputs stay until there are new ones"
    write(folder, 0, 1, 2, 3, existing=Existing.OVERWRITE)
    assert content_of(folder) == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": "other"}, "something else is run now: the requests. "),
        (
            {"requests": "other", "num_requests": 9},
            "something else is run now: the requests: 4 then, 9 now. ",
        ),
        (
            {"pipeline": {"name": "p", "stages": {"writer": {"model": "n", "sampling": None}}}},
            "stages.writer.model: 'm' then, 'n' now; stages.writer.sampling: "
            "{'temperature': 0.0} then, None now. ",
        ),
        (
            {"pipeline": {key: 1 for key in "abcde"}},
            "name: 'p' then, None now; stages: ",
        ),
    ],
)
@pytest.mark.parametrize("whole_run", [False, True])
def test_only_the_same_run_is_resumed(
    whole_run: bool, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, *(range(NUMBER) if whole_run else [2]))
    before = content_of(tmp_path)
    with pytest.raises(ValueError, match="cannot be resumed") as error:
        opened(tmp_path, Existing.RESUME, RECORD.model_copy(update=change))
    assert message in str(error.value)
    assert content_of(tmp_path) == before


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no record": lambda folder: (folder / "run.json").unlink(),
    "a torn record": lambda folder: os.truncate(folder / "run.json", 9),
    "an empty record": lambda folder: os.truncate(folder / "run.json", 0),
    "a record of the future": lambda folder: (folder / "run.json").write_text(
        json.dumps(json.loads((folder / "run.json").read_text()) | {"format": 2})
    ),
    "a line of another run": lambda folder: prepended(folder, b"{}\n"),
    "a line that is not JSON": lambda folder: prepended(folder, b"nonsense\n"),
    "a blank line": lambda folder: prepended(folder, b"\n"),
    "a list": lambda folder: prepended(folder, b"[1]\n"),
    "a deep line": lambda folder: prepended(folder, b"[" * 100_000 + b"\n"),
    "no such position": lambda folder: prepended(folder, line(position=4)),
    "a position that is text": lambda folder: prepended(folder, line(position="1")),
    "an error that is a number": lambda folder: prepended(folder, line(error=1)),
    "a file name that is a number": lambda folder: prepended(
        folder, line(stages={"a": {"audio": 1}})
    ),
    "tensors that are a list": lambda folder: prepended(folder, line(stages={"a": {"tensors": 1}})),
}


def line(**changes: Any) -> bytes:
    good = {"position": 0, "request_id": "r0", "error": None, "stages": {}}
    return json.dumps(good | changes).encode() + b"\n"


def prepended(folder: Path, content: bytes) -> None:
    file = folder / "outputs.partial.jsonl"
    file.write_bytes(content + file.read_bytes())


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_outputs_are_not_resumed(damage: str, tmp_path: Path) -> None:
    write(tmp_path, 2, 1)
    DAMAGES[damage](tmp_path)
    with pytest.raises(ValueError, match=r"cannot be resumed.*(--overwrite|damaged)"):
        opened(tmp_path, Existing.RESUME)
    write(tmp_path, 0, existing=Existing.OVERWRITE)


def test_an_outputs_file_of_too_few_lines_is_not_resumed(tmp_path: Path) -> None:
    write(tmp_path, *range(NUMBER))
    file = tmp_path / "outputs.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="cannot be resumed"):
        opened(tmp_path, Existing.RESUME)


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_last_line_that_was_cut_off_is_written_again(
    cut: int, whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    write(folder, 0, 1)
    file = folder / "outputs.partial.jsonl"
    os.truncate(file, file.stat().st_size - cut)
    with opened(folder, Existing.RESUME) as writer:
        assert [writer.is_done(position) for position in range(NUMBER)] == [True] + [False] * 3
    write(folder, 1, 2, 3, existing=Existing.RESUME)
    assert content_of(folder) == whole


@pytest.mark.parametrize("kind", ["tensors", "audio"])
def test_a_request_whose_file_is_missing_is_run_again(
    kind: str, whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    write(folder, 0, 1, 2)
    for file in (folder / kind / "r2").iterdir():
        file.unlink()
    with opened(folder, Existing.RESUME) as writer:
        assert not writer.is_done(2)
        assert writer.is_done(0)
    write(folder, 3, 2, existing=Existing.RESUME)
    assert content_of(folder) == whole


@pytest.mark.parametrize("place", ["/etc/passwd", "../x", "tensors/../../x", "link/x", "a\0b"])
def test_a_line_that_names_a_file_outside_is_run_again(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write(folder, 1)
    (tmp_path / "x").touch()
    (folder / "link").symlink_to(tmp_path)
    prepended(folder, line(stages={"writer": {"audio": place}}))
    with opened(folder, Existing.RESUME) as writer:
        assert not writer.is_done(0)


def test_only_one_run_at_a_time_writes_into_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path):
        with pytest.raises(ValueError, match="another run is writing into this folder"):
            opened(tmp_path, Existing.OVERWRITE)
        assert [file.name for file in tmp_path.iterdir()] == [".outputs.lock"]
    write(tmp_path, *range(NUMBER))


_HOLDER_PROGRAM = """
import sys
from omni.requests.output_writer import OutputFolder
folder = OutputFolder(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_run_releases_its_folder(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER_PROGRAM, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another run"):
            opened(tmp_path)
        process.kill()
    write(tmp_path, *range(NUMBER))


def test_a_refused_folder_is_released(tmp_path: Path) -> None:
    write(tmp_path, 2)
    with suppress(ValueError):
        opened(tmp_path)
    with pytest.raises(ValueError, match="something else"):
        opened(tmp_path, Existing.RESUME, RECORD.model_copy(update={"requests": "x"}))
    write(tmp_path, 0, existing=Existing.RESUME)


@pytest.mark.parametrize("place", ["file", "file/folder"])
def test_a_path_that_cannot_be_a_folder_is_named(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="give an --output-dir that can be made") as error:
        write(tmp_path / place, 0)
    assert error.value.filename == str(tmp_path / place)


class FullDisk:
    """Makes the n-th call of a writing function fail; a write is half done."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: int) -> None:
        self.calls = 0
        self._fails = fails
        for name in ("write", "open", "replace", "mkdir", "fsync", "unlink"):
            patch.setattr(os, name, self._counted(getattr(os, name)))
        patch.setattr(output_writer, "save_file", self._counted(save_file))
        patch.setattr(Waveform, "save", self._counted(Waveform.save))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._fails:
                if real.__name__ == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **options)

        return call


def test_a_full_disk_at_any_point_loses_no_finished_request(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    """Each writing call fails in turn, possibly after half of the write."""
    fails, has_failed = 0, True
    while has_failed:
        fails += 1
        folder = tmp_path / f"out-{fails}"
        done: list[int] = []
        failed = False
        with pytest.MonkeyPatch.context() as patch:
            disk = FullDisk(patch, fails)
            try:
                with opened(folder) as writer:
                    for position in (3, 0, 1, 2):
                        writer.write(position, output(position))
                        done.append(position)
                    writer.finish()
            except OSError as error:
                failed = True
                assert error.errno == errno.ENOSPC
        has_failed = disk.calls >= fails  # the lock can be taken in spite of a failed call
        if failed and "outputs.jsonl" not in content_of(folder):
            journal = content_of(folder).get("outputs.partial.jsonl", b"")
            assert journal == b"" or journal.endswith(b"\n")
            assert [json.loads(each)["position"] for each in journal.splitlines()] == done
        with opened(folder, Existing.RESUME) as writer:
            assert [position for position in (3, 0, 1, 2) if writer.is_done(position)] == done
            for position in range(NUMBER):
                if not writer.is_done(position):
                    writer.write(position, output(position))
            writer.finish()
        assert content_of(folder) == whole
    assert fails > 40
