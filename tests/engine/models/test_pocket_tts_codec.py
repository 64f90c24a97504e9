"""Pocket TTS's codec and its halves against transformers': whole, in chunks and in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.pocket_tts_audio_tokenizer import PocketTTSAudioTokenizerModel

from engine.checkpoints.checkpoint import Checkpoint
from engine.models.pocket_tts.codec import PocketCodec, bits_of, latents_of, load_half
from omni.seeded.checkpoints import resolve_model
from omni.seeded.speech import build_pocket_codec
from tests.support.codec_streams import in_chunks, run_together

CPU = torch.device("cpu")
LATENT_DIM = 8


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(resolve_model("seeded:pocket_tts_codec"))


@pytest.fixture(scope="module")
def codec(folder: Path) -> PocketCodec:
    return PocketCodec(Checkpoint.open(folder), CPU)


def some_latents(length: int, seed: int = 0) -> Tensor:
    return torch.randn(length, LATENT_DIM, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def sound_of(folder: Path, latents: Tensor) -> Tensor:
    """Return the sound of transformers' codec, with the fade of its processor."""
    codec: Any = PocketTTSAudioTokenizerModel.from_pretrained(folder).eval()
    sound: Tensor = codec.decode(latents[None]).audio_values.flatten()
    assert sound.std() > 0.02
    fade = torch.linspace(0, 1, int(0.005 * codec.config.sampling_rate))[: len(sound)]
    sound[: len(fade)] *= fade
    return sound


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_bits_are_those_of_the_numbers(numbers: list[float]) -> None:
    latents = torch.tensor(numbers)
    bits = bits_of(latents)
    assert bits.dtype == torch.int64 and bits.min() >= 0 and bits.max() < PocketCodec.num_codes
    assert latents_of(bits).view(torch.int32).equal(latents.view(torch.int32))


def test_attributes_of_the_codec(codec: PocketCodec) -> None:
    assert (codec.sampling_rate, codec.samples_per_code, codec.num_missing) == (24_000, 1920, 0)
    assert (codec.num_codebooks, codec.max_codes) == (LATENT_DIM, 2**20)


@pytest.mark.parametrize("lengths", [[25], [1] * 21, [1, 2, 3, 4, 5, 6], [20, 1], [1], [500, 9]])
def test_sound_is_that_of_transformers(
    lengths: list[int], folder: Path, codec: PocketCodec
) -> None:
    latents = some_latents(sum(lengths))
    close(in_chunks(codec, bits_of(latents), lengths), sound_of(folder, latents))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 1},
        {"use_conv_shortcut": True, "num_residual_layers": 2, "num_key_value_heads": 1},
        {"latent_stride": 8, "upsampling_ratios": [4, 4], "attention_bias": True},
    ],
    ids=str,
)
def test_other_configs(changes: dict[str, Any], tmp_path: Path) -> None:
    build_pocket_codec(tmp_path, **changes)
    codec, latents = PocketCodec(Checkpoint.open(tmp_path), CPU), some_latents(15)
    close(in_chunks(codec, bits_of(latents), [1, 2, 3, 4, 5]), sound_of(tmp_path, latents))


def test_utterances_at_different_places_run_together(codec: PocketCodec) -> None:
    run_together(codec, lambda *given: bits_of(some_latents(*given)), [0, 0, 1, 5, 2])


def test_each_half_holds_its_own_weights(folder: Path, codec: PocketCodec) -> None:
    checkpoint = Checkpoint.open(folder)
    encoder = load_half("encoder", checkpoint, CPU)
    assert encoder.decoder is None and codec.network.encoder is None
    sizes = {name: tensor.nbytes for name, tensor in checkpoint.weights(checkpoint.weight_files)}
    decoding = sum(n for name, n in sizes.items() if not name.startswith("encoder."))
    assert 0 < decoding == codec.nbytes < sum(sizes.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_causal_conv": False}, "use_causal_conv must be True, got False"),
        ({"latent_stride": 1}, "frame_rate must be half"),
    ],
)
def test_configs_that_would_sound_wrong_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    build_pocket_codec(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        PocketCodec(Checkpoint.open(tmp_path), CPU)
