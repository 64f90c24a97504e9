"""Sound is written as FFmpeg and libsndfile read it, however it is cut and at any speed."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch

from engine import Waveform
from omni.server.openai.speech import SpokenFile, SpokenPieces

PITCH = 330.0


def tone(rate: int, seconds: float = 1.0) -> np.ndarray:
    times = np.arange(round(rate * seconds)) / rate
    return (0.5 * np.sin(2 * np.pi * PITCH * times)).astype(np.float32)


def pieces_of(samples: np.ndarray, rate: int, cut: int) -> list[Waveform]:
    return [
        Waveform(torch.from_numpy(samples[at : at + cut]), rate)
        for at in range(0, len(samples), cut)
    ]


def pitch_of(samples: np.ndarray, rate: int) -> float:
    padded = np.abs(np.fft.rfft(samples * np.hanning(len(samples)), 4 * rate))
    return float(padded.argmax() / 4)


@pytest.mark.parametrize("speed", [0.25, 0.7, 1.9, 4.0])
@pytest.mark.parametrize("rate", [16_000, 24_000])
def test_speed_changes_the_time_and_not_the_pitch(speed: float, rate: int):
    found = []
    for cut in (rate // 10, 997):
        pieces = SpokenPieces(24_000, speed)
        parts = [pieces.feed(each) for each in pieces_of(tone(rate, 2.0), rate, cut)]
        found.append(np.frombuffer(b"".join([*parts, pieces.flush()]), "<i2") / 2**15)
    assert len(found[0]) / 24_000 == pytest.approx(2.0 / speed, abs=0.12)
    assert pitch_of(found[0], 24_000) == pytest.approx(PITCH, abs=2)
    assert np.abs(found[0]).max() == pytest.approx(0.5, abs=0.05)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("form", ["mp3", "opus", "aac", "flac"])
@pytest.mark.parametrize("rate", [16_000, 22_050, 40_000])
def test_files_are_decoded_by_other_libraries(form: Any, rate: int):
    file = SpokenFile(form)
    parts = [file.feed(each) for each in pieces_of(tone(rate), rate, rate // 20)]
    content = b"".join([*parts, file.flush()])
    with av.open(io.BytesIO(content)) as opened:
        frames = [frame.to_ndarray()[0] for frame in opened.decode(audio=0)]
        read_rate = opened.streams.audio[0].rate
    samples = np.concatenate(frames)
    assert len(samples) / read_rate == pytest.approx(1.0, abs=0.12)
    assert pitch_of(samples, read_rate) == pytest.approx(PITCH, abs=1)
    if form != "flac":
        assert sum(map(bool, parts)) > 2, "it comes while it is made"
    if form != "aac":  # which libsndfile does not know
        samples, read_rate = soundfile.read(io.BytesIO(content))
        assert len(samples) / read_rate == pytest.approx(1.0, abs=0.12)
        assert pitch_of(samples, read_rate) == pytest.approx(PITCH, abs=1)
