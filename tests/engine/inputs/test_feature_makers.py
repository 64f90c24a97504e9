"""What an extractor makes of sound does not depend on the silence that it is told to add."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from engine.inputs.multimodal_inputs import AudioFeatureMaker

# As published: a window of five minutes. Shorter here, by its end only.
EXTRACTOR = WhisperFeatureExtractor(feature_size=32, chunk_length=3)
WINDOW = 48_000


@pytest.mark.parametrize("num_samples", [1, 161, 1600, 15_999, 16_001, WINDOW - 300, WINDOW])
def test_features_are_those_of_a_window_filled_to_its_end(num_samples: int) -> None:
    noise = np.random.default_rng(num_samples).standard_normal(num_samples)
    samples = (0.1 * noise).astype(np.float32)
    filled = EXTRACTOR(
        samples,
        sampling_rate=16_000,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="pt",
    )
    expected = filled["input_features"][0][:, filled["attention_mask"][0].bool()]
    found = AudioFeatureMaker(EXTRACTOR).make(samples)["input_features"]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_a_short_sound_does_not_fill_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    plain = WhisperFeatureExtractor._torch_extract_fbank_features

    def counting(self: WhisperFeatureExtractor, waveform: np.ndarray, device: str = "cpu"):
        lengths.append(waveform.shape[-1])
        return plain(self, waveform, device)

    monkeypatch.setattr(WhisperFeatureExtractor, "_torch_extract_fbank_features", counting)
    AudioFeatureMaker(EXTRACTOR).make(np.zeros(1_600, np.float32))
    assert lengths == [2_080]
