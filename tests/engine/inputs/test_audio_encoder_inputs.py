"""Speech becomes what transformers' feature extractor makes of it, or a clear error."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import SeamlessM4TFeatureExtractor, WhisperFeatureExtractor

from engine import AudioPrompt, ImagePrompt, TextPrompt, TokensPrompt
from engine.inputs.encoder_decoder_inputs import AudioEncoderInputs
from engine.media.sound_file import SampleReader, load_extractor
from engine.requests.encoder_input import EncoderInput
from tests.support.fixed_encoder import FixedEncoder

RATE = 16_000
EXTRACTOR = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
INPUTS = AudioEncoderInputs(FixedEncoder(max_encoder_len=50), EXTRACTOR)


def tone(seconds: float, rate: int = RATE, hertz: float = 300.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate).astype(np.float32)


def write_wav(path: Path, samples: np.ndarray, rate: int = RATE) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return path


def make(prompt: object, salt: str | None = None):
    return INPUTS.make(prompt, cache_salt=salt)


@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray, lambda x: x.astype(np.float64)])
def test_samples_become_the_extractors_features(kind) -> None:
    samples = tone(0.7)
    made = make(AudioPrompt(kind(samples)))
    expected = EXTRACTOR(samples, sampling_rate=RATE, return_tensors="pt")["input_features"][0]
    assert torch.equal(made.features["input_features"], expected)
    assert made.num_tokens == 50
    assert made.token_ids == ()


def test_a_file_is_known_by_its_samples(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", tone(0.5))
    samples = np.round(tone(0.5) * 32767).astype(np.float32) / 32768
    hashes = {
        make(AudioPrompt(path)).content_hash,
        make(AudioPrompt(str(path), sampling_rate=RATE)).content_hash,
        make(AudioPrompt(samples, language="fr", task="translate")).content_hash,
    }
    assert len(hashes) == 1, "what the decoder is asked for changes nothing in the encoder"


def test_other_sound_and_another_salt_are_known_apart() -> None:
    prompts = [AudioPrompt(tone(0.5)), AudioPrompt(tone(0.5, hertz=301)), AudioPrompt(tone(0.6))]
    hashes = {make(prompt, salt).content_hash for prompt in prompts for salt in (None, "", "a")}
    assert len(hashes) == 9


def test_a_whole_window_is_one_input_and_more_becomes_windows(tmp_path: Path) -> None:
    assert isinstance(make(AudioPrompt(tone(1.0))), EncoderInput)
    longer = tone(1.25)
    for audio in (longer, write_wav(tmp_path / "a.wav", longer)):
        assert make(AudioPrompt(audio)).num_frames == 125


WRONG = {
    "text": ("hello", "encoder takes audio .* but the encoder prompt is text"),
    "a text prompt": (TextPrompt("hello"), "the encoder prompt is text"),
    "token ids": (TokensPrompt((1, 2)), "the encoder prompt is token ids"),
    "an image": (ImagePrompt("a.png"), "the encoder prompt is an image"),
    "nothing": (AudioPrompt(np.zeros(0, np.float32)), "the audio is empty"),
    "stereo": (AudioPrompt(np.zeros((2, 9), np.float32)), r"must be mono.*got shape \(2, 9\)"),
    "integers": (AudioPrompt(torch.zeros(9, dtype=torch.int16)), "got torch.int16"),
    "a list": (AudioPrompt([0.0, 0.1]), "got list"),
    "not a number": (AudioPrompt(np.array([0.0, np.nan])), "NaN or infinite"),
    "no rate": (AudioPrompt(tone(0.1), sampling_rate=0), "sampling rate of 0 samples per second"),
    "no file": (AudioPrompt("no.wav"), "'no.wav' cannot be read"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_speech_is_refused(kind: str) -> None:
    prompt, expected = WRONG[kind]
    with pytest.raises(ValueError, match=expected):
        make(prompt)


def test_a_files_own_sampling_rate_cannot_be_contradicted(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", tone(0.1))
    with pytest.raises(ValueError, match="has 16000 samples per second, but the prompt says"):
        make(AudioPrompt(path, sampling_rate=8_000))


def test_the_extractor_comes_from_the_checkpoint(tmp_path: Path) -> None:
    EXTRACTOR.save_pretrained(tmp_path)
    assert SampleReader.of(load_extractor(tmp_path)).longest.seconds == 1.0


def test_a_checkpoint_without_the_right_extractor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="feature extractor in .* cannot be loaded"):
        AudioEncoderInputs(FixedEncoder(), load_extractor(tmp_path))
    SeamlessM4TFeatureExtractor(feature_size=16, num_mel_bins=16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a SeamlessM4T.*must make spectrograms of windows"):
        AudioEncoderInputs(FixedEncoder(), load_extractor(tmp_path))
