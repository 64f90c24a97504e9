"""What is written as WAV reads back as it was, to the nearest of its steps."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import Waveform
from engine.media.wav_file import read_wav, write_wav


def test_samples_read_back_to_half_a_step(tmp_path: Path) -> None:
    samples = torch.rand(4_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    write_wav(tmp_path / "a.wav", Waveform(samples, 24_000))
    found, rate = read_wav(tmp_path / "a.wav", longest_s=1.0)
    assert rate == 24_000
    # Written in steps of 1 / 32767, read in steps of 1 / 32768.
    assert np.abs(found * 32_768 / 32_767 - samples.numpy()).max() <= 0.5001 / 32_767


def test_what_is_too_loud_is_clipped_not_wrapped(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", Waveform(torch.tensor([1.0, 1.5, 99.0, -1.0, -7.0, 0.0]), 8_000))
    with wave.open(str(tmp_path / "a.wav"), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 8_000)
        found = np.frombuffer(file.readframes(6), "<i2").tolist()
    assert found == [32_767] * 3 + [-32_767] * 2 + [0]


def test_silence_without_length_is_a_file_too(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", Waveform(torch.zeros(0), 24_000))
    with wave.open(str(tmp_path / "a.wav"), "rb") as file:
        assert (file.getnframes(), file.getframerate()) == (0, 24_000)


@pytest.mark.parametrize(
    "samples",
    [torch.tensor([0.0, torch.nan]), torch.zeros(2, 3), torch.zeros(3, dtype=torch.int16)],
)
def test_what_is_no_waveform_is_refused_and_leaves_no_file(
    tmp_path: Path, samples: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="finite floating point numbers"):
        write_wav(tmp_path / "a.wav", Waveform(samples, 24_000))
    assert not (tmp_path / "a.wav").exists()


def test_a_waveform_knows_how_long_it_sounds() -> None:
    assert Waveform(torch.zeros(12_000), 24_000).duration_s == 0.5
