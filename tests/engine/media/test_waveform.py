"""What is written reads back as it was, to the nearest of its steps."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import Waveform
from engine.media.media_source import MediaSource
from engine.media.sound_file import LongestSound, read_sound


def read(path: Path) -> tuple[np.ndarray, int]:
    return read_sound(MediaSource(path, "audio", 2**20), longest=LongestSound(2.0))


def test_samples_read_back_to_half_a_step(tmp_path: Path) -> None:
    samples = torch.rand(4_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    Waveform(samples, 24_000).save(tmp_path / "a.wav")
    found, rate = read(tmp_path / "a.wav")
    assert rate == 24_000
    # Written in steps of 1 / 32767, read in steps of 1 / 32768.
    assert np.abs(found * 32_768 / 32_767 - samples.numpy()).max() <= 0.5001 / 32_767


def test_what_is_too_loud_is_clipped_not_wrapped(tmp_path: Path) -> None:
    Waveform(torch.tensor([1.0, 1.5, 99.0, -1.0, -7.0, 0.0]), 8_000).save(tmp_path / "a.wav")
    with wave.open(str(tmp_path / "a.wav"), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 8_000)
        found = np.frombuffer(file.readframes(6), "<i2").tolist()
    assert found == [32_767] * 3 + [-32_767] * 2 + [0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_samples_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(0)
    halves = torch.tensor([0.5, 1.5, -2.5, 3e4 * 32_767], dtype=torch.float64)
    samples = torch.cat([torch.randn(5_000, generator=chance).double(), halves / 32_767]).to(dtype)
    scaled = samples.float().clamp(-1.0, 1.0) * 32_767
    found = np.frombuffer(Waveform(samples, 24_000).encoded("pcm16"), "<i2")
    assert np.array_equal(found, scaled.round().to(torch.int16).numpy())


def test_silence_without_length_is_a_file_too(tmp_path: Path) -> None:
    Waveform(torch.zeros(0), 24_000).save(tmp_path / "a.wav")
    with wave.open(str(tmp_path / "a.wav"), "rb") as file:
        assert (file.getnframes(), file.getframerate()) == (0, 24_000)


@pytest.mark.parametrize(
    "samples",
    [
        torch.tensor([0.0, torch.nan]),
        torch.tensor([torch.inf]),
        torch.zeros(2, 3),
        torch.zeros(3, dtype=torch.int16),
    ],
)
def test_what_is_no_waveform_is_refused_and_leaves_no_file(
    tmp_path: Path, samples: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="finite floating point numbers"):
        Waveform(samples, 24_000).save(tmp_path / "a.wav")
    assert not (tmp_path / "a.wav").exists()


def test_a_waveform_knows_how_long_it_sounds() -> None:
    assert Waveform(torch.zeros(12_000), 24_000).duration_s == 0.5


@pytest.mark.parametrize("format", ["flac", "ogg", "mp3", "WAV"])
@pytest.mark.parametrize("by_ending", [True, False])
def test_other_formats_are_chosen_by_name_or_ending(
    tmp_path: Path, format: str, by_ending: bool
) -> None:
    times = torch.arange(24_000) / 24_000
    tone = Waveform(0.5 * torch.sin(2 * torch.pi * 440 * times), 24_000)
    path = tmp_path / (f"a.{format}" if by_ending else "a.partial")
    tone.save(path, None if by_ending else format)
    found, rate = read(path)
    assert rate == 24_000
    # MP3 and OGG are near, and may be longer by a block.
    assert np.abs(found[2_000:22_000] - tone.samples.numpy()[2_000:22_000]).max() < 0.05


@pytest.mark.parametrize("name", ["a", "a.txt", "a.wav.partial"])
def test_a_format_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="written as wav, flac, ogg, mp3, got"):
        Waveform(torch.zeros(9), 24_000).save(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_rate_that_the_format_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1001 samples per second cannot be written as mp3"):
        Waveform(torch.zeros(9), 1_001).save(tmp_path / "a.mp3")
    assert not (tmp_path / "a.mp3").exists()
