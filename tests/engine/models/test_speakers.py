"""Voices are read as data, checked, and found by name."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.qwen2_5_omni.speakers import SPEAKERS_FILE, Speakers, load_speakers


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "bos_token": 7,
        "cond": torch.ones(1, 4, dtype=torch.bfloat16),
        "ref_mel": torch.zeros(1, 5, 3),
    } | changes


def save(folder: Path, content: Any) -> Path:
    torch.save(content, folder / SPEAKERS_FILE)
    return folder


def test_the_seeded_checkpoint_has_voices(seeded: Callable[[str], str]) -> None:
    speakers = load_speakers(Path(seeded("qwen2_5_omni")))
    assert speakers.names == ("Chelsie", "Ethan")
    assert speakers.get(None) is speakers.default is speakers.get("Chelsie")
    ethan = speakers.get("Ethan")
    assert ethan.name == "Ethan" and ethan.bos_token != speakers.default.bos_token
    assert ethan.conditioning.shape == (1, 16) and ethan.reference_mel.shape == (1, 40, 80)


@pytest.mark.parametrize(
    ("names", "default"), [(("Zoe", "Chelsie"), "Chelsie"), (("Zoe", "Ada"), "Zoe")]
)
def test_the_default_is_chelsie_or_the_first(
    tmp_path: Path, names: tuple[str, ...], default: str
) -> None:
    speakers = load_speakers(save(tmp_path, {name: entry() for name in names}))
    assert speakers.names == names
    assert speakers.default.name == default


def test_numbers_are_float32_whatever_the_file_has(tmp_path: Path) -> None:
    speaker = load_speakers(save(tmp_path, {"A": entry()}) / SPEAKERS_FILE).default
    assert speaker.conditioning.dtype == speaker.reference_mel.dtype == torch.float32


@pytest.fixture
def speakers(tmp_path: Path) -> Speakers:
    return load_speakers(save(tmp_path, {"Chelsie": entry(), "Ethan": entry()}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Ethen", r"'Ethen' \(did you mean 'Ethan'\?\); this checkpoint has Chelsie, Ethan"),
        ("Quux", "'Quux'; this checkpoint has Chelsie, Ethan"),
        (["Ethan"], "by name, got list"),
    ],
)
def test_an_unknown_speaker_is_told_who_there_is(
    speakers: Speakers, name: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        speakers.get(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "must map names to speakers"),
        ([entry()], "must map names to speakers, it holds a list"),
        ({"A": 3}, "'A' .* must have a name and bos_token, cond, ref_mel"),
        ({3: entry()}, "speaker 3 .* must have a name"),
        ({"A": {"bos_token": 7}}, "must have a name and bos_token, cond, ref_mel"),
        ({"A": entry(bos_token="7")}, "bos_token must be a token id, got '7'"),
        ({"A": entry(bos_token=-1)}, "bos_token must be a token id, got -1"),
        ({"A": entry(cond=torch.ones(4))}, r"cond must be a tensor of 2 dimensions.*got \(4,\)"),
        ({"A": entry(cond=[1.0])}, "cond must be a tensor.*got list"),
        ({"A": entry(ref_mel=torch.ones(2, 5, 3))}, r"ref_mel must be .*got \(2, 5, 3\)"),
        ({"A": entry(ref_mel=torch.ones(1, 0, 3))}, "ref_mel must hold finite numbers"),
        ({"A": entry(cond=torch.full((1, 4), torch.nan))}, "cond must hold finite numbers"),
        ({"A": entry(bos_token=True)}, "bos_token must be a token id, got True"),
        ({"A": entry(cond=torch.ones(1, 4).int())}, "cond must hold plain floating-point"),
        ({"A": entry(cond=torch.ones(1, 4).to_sparse())}, "cond must hold plain floating-point"),
        ({"A": entry(cond=torch.ones(1, 4, device="meta"))}, "cond must hold plain floating-point"),
        (
            {"A": entry(cond=torch.ones(1, 1).expand(1, 10**12))},
            r"cond has the shape \(1, 1000000000000\), but not as many numbers",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_speakers(save(tmp_path, content))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    with pytest.raises(ValueError, match="cannot be read as a dictionary of speakers"):
        load_speakers(save(tmp_path, {"A": entry(cond=Bomb())}))
    assert not (tmp_path / "exploded").exists()


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = save(tmp_path, {"A": entry()}) / SPEAKERS_FILE
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match="cannot be read as .*: it is compressed"):
        load_speakers(tmp_path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    save(tmp_path, {"A": entry()})
    os.truncate(tmp_path / SPEAKERS_FILE, 2**36)
    with pytest.raises(ValueError, match="it has 68719476736 bytes"):
        load_speakers(tmp_path)


def test_voices_stay_when_their_file_changes(tmp_path: Path) -> None:
    speaker = load_speakers(save(tmp_path, {"A": entry()})).default
    os.truncate(tmp_path / SPEAKERS_FILE, 0)
    assert speaker.reference_mel.sum() == 0 and speaker.conditioning.sum() == 4


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SPEAKERS_FILE).write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as a dictionary of speakers"):
        load_speakers(tmp_path)


def test_a_checkpoint_without_voices_cannot_speak(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="spk_dict.pt is missing: .* it cannot speak"):
        load_speakers(tmp_path)
