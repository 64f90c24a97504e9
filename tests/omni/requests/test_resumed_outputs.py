"""Folders that have outputs already: refused, replaced, or gone on with where a run stopped."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine import FinishReason, Waveform
from omni.requests import output_writer
from omni.requests.output_writer import Existing, OutputWriter, RunRecord
from omni.requests.request import OmniOutput
from stages import StageOutput
from tests.support.import_graph import ROOT

FINAL = {"writer": ("text", "tensors"), "voice": ("audio",)}
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
    return OutputWriter(folder, FINAL, record, existing)


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
    """What an undisturbed run leaves behind."""
    write(tmp_path / "undisturbed", 3, 0, 1, 2)
    return content_of(tmp_path / "undisturbed")


@pytest.mark.parametrize("done", [(), (2,), (1, 3), (0, 1, 2), (3, 2, 1, 0)])
def test_a_resumed_run_ends_as_an_undisturbed_one(
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


def test_a_finished_run_is_resumed_to_nothing(whole: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "undisturbed"
    with opened(folder, Existing.RESUME) as writer:
        assert all(map(writer.is_done, range(NUMBER)))
        assert writer.num_failed == 1
        writer.finish()
    assert content_of(folder) == whole


@pytest.mark.parametrize("whole_run", [False, True])
def test_outputs_are_refused_unless_it_is_said_what_to_do(whole_run: bool, tmp_path: Path) -> None:
    write(tmp_path, *(range(NUMBER) if whole_run else [2]))
    before = content_of(tmp_path)
    with pytest.raises(ValueError, match="has the outputs of an earlier run.*--overwrite") as error:
        opened(tmp_path)
    assert ("--resume" in str(error.value)) is not whole_run
    assert content_of(tmp_path) == before


@pytest.mark.parametrize("whole_run", [False, True])
def test_outputs_are_replaced_where_that_is_asked_for(
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
    assert content_of(folder) == before, "nothing goes before there is something in its place"
    write(folder, 0, 1, 2, 3, existing=Existing.OVERWRITE)
    assert content_of(folder) == whole


@pytest.mark.parametrize(
    ("change", "told"),
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
    whole_run: bool, change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    write(tmp_path, *(range(NUMBER) if whole_run else [2]))
    before = content_of(tmp_path)
    with pytest.raises(ValueError, match="cannot be resumed") as error:
        opened(tmp_path, Existing.RESUME, RECORD.model_copy(update=change))
    assert told in str(error.value)
    assert content_of(tmp_path) == before


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no record": lambda folder: (folder / "run.json").unlink(),
    "a torn record": lambda folder: os.truncate(folder / "run.json", 9),
    "an empty record": lambda folder: os.truncate(folder / "run.json", 0),
    "a record of the future": lambda folder: (folder / "run.json").write_text(
        json.dumps(json.loads((folder / "run.json").read_text()) | {"format": 2})
    ),
    "another's line": lambda folder: prepended(folder, b"{}\n"),
    "a line that is no JSON": lambda folder: prepended(folder, b"nonsense\n"),
    "a blank line": lambda folder: prepended(folder, b"\n"),
    "a list": lambda folder: prepended(folder, b"[1]\n"),
    "a deep line": lambda folder: prepended(folder, b"[" * 100_000 + b"\n"),
    "no such position": lambda folder: prepended(folder, line(position=4)),
    "a position that is text": lambda folder: prepended(folder, line(position="1")),
    "an error that is a number": lambda folder: prepended(folder, line(error=1)),
    "files that are no names": lambda folder: prepended(folder, line(stages={"a": {"audio": 1}})),
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
def test_a_request_whose_file_is_gone_is_run_again(
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


def test_a_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path):
        with pytest.raises(ValueError, match="another run is writing into this folder"):
            opened(tmp_path, Existing.OVERWRITE)
        assert [file.name for file in tmp_path.iterdir()] == [".outputs.lock"]
    write(tmp_path, *range(NUMBER))


_HOLDS = """
import sys
from omni.requests.output_writer import OutputFolder
folder = OutputFolder(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_run_lets_go_of_its_folder(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(tmp_path)],
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


def test_a_folder_that_was_refused_is_let_go_of(tmp_path: Path) -> None:
    write(tmp_path, 2)
    with suppress(ValueError):
        opened(tmp_path)
    with pytest.raises(ValueError, match="something else"):
        opened(tmp_path, Existing.RESUME, RECORD.model_copy(update={"requests": "x"}))
    write(tmp_path, 0, existing=Existing.RESUME)


@pytest.mark.parametrize("place", ["file", "file/folder"])
def test_a_place_that_can_be_no_folder_is_told_with_what_to_give(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="give an --output-dir that can be made") as error:
        write(tmp_path / place, 0)
    assert error.value.filename == str(tmp_path / place)


LINKS = ["outputs.partial.jsonl", ".outputs.lock", "tensors", "audio", "tensors/r0"]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_in_the_folder_is_not_followed(name: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "out", tmp_path / "outside"
    (folder / name).parent.mkdir(parents=True)
    outside.mkdir()
    target = outside if not name.endswith(("jsonl", "lock")) else outside / "file"
    (folder / name).symlink_to(target)
    with pytest.raises((OSError, ValueError)) as error:
        write(folder, 0, 1, 2, 3)
    assert not list(outside.iterdir())
    told = f"{error.value} {getattr(error.value, 'filename', '')}"
    assert "outputs" in told or name.partition("/")[0] in told


@pytest.mark.parametrize("name", ["outputs.jsonl", "run.json", "outputs.partial.jsonl"])
@pytest.mark.parametrize("existing", [Existing.OVERWRITE, Existing.RESUME])
def test_a_link_in_the_place_of_a_file_is_replaced_or_refused(
    name: str, existing: Existing, whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder, outside = tmp_path / "out", tmp_path / "outside"
    write(folder, 0)
    outside.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"mine")
    before = outside.read_bytes()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with suppress(OSError, ValueError):
        rest = range(NUMBER) if existing is Existing.OVERWRITE else (1, 2, 3)
        write(folder, *rest, existing=existing)
        assert content_of(folder) == whole
    assert outside.read_bytes() == before


def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "outputs.partial.jsonl")
    (tmp_path / "outputs.jsonl").touch()
    with pytest.raises(ValueError, match="no run.json"):
        opened(tmp_path, Existing.RESUME)
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises((ValueError, OSError), match="no regular file"):
        opened(tmp_path, Existing.RESUME)


class FullDisk:
    """The n-th call of one of the ways to write fails; of a write, half is done."""

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


def test_a_full_disk_at_any_point_loses_nothing_that_was_done(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    """At every call that writes, in turn, of which half may have been done."""
    fails, failed = 0, True
    while failed:
        fails += 1
        folder = tmp_path / f"out-{fails}"
        done: list[int] = []
        failed = False
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(patch, fails)
            try:
                with opened(folder) as writer:
                    for position in (3, 0, 1, 2):
                        writer.write(position, output(position))
                        done.append(position)
                    writer.finish()
            except OSError as error:
                failed = True
                assert error.errno == errno.ENOSPC
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
