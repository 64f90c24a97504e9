"""CSM's codec and encoder against transformers': whole, in chunks and in batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.csm.configuration_csm import CsmConfig
from transformers.models.csm.modeling_csm import CsmForConditionalGeneration

from engine.checkpoints.checkpoint import Checkpoint, CheckpointPart
from engine.checkpoints.config_file import quiet_config_log
from engine.models.base import ModelSettings
from engine.models.csm.codec import MimiCodec, MimiEncoder, names_of_half
from tests.support.codec_streams import in_chunks, run_together

PART = CheckpointPart("codec", "csm", "codec_config", "codec_model.", "MimiModel")
CPU = torch.device("cpu")
NUM_CODES = 32
# A window of three codes, and layer scales of 1, so that layers contribute visibly.
CODEC: Mapping[str, Any] = {
    "model_type": "mimi",
    "hidden_size": 16,
    "num_filters": 2,
    "num_quantizers": 6,
    "codebook_size": NUM_CODES,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
    "upsample_groups": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 6,
    "layer_scale_initial_scale": 1.0,
    "upsampling_ratios": [4, 3, 2, 2],
    "max_position_embeddings": 200,
}
DEPTH = {"num_codebooks": 4, "backbone_hidden_size": 32, "vocab_size": 35}
SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TOKENS = {"pad_token_id": 2, "bos_token_id": 0, "audio_token_id": 2, "audio_eos_token_id": 3}


def make_config(**codec: Any) -> CsmConfig:
    return CsmConfig(
        num_codebooks=4,
        vocab_size=35,
        text_vocab_size=64,
        codebook_pad_token_id=33,
        depth_decoder_config={**SIZES, **DEPTH},
        codec_config=dict(CODEC) | codec,
        **SIZES,
        **TOKENS,
    )


def open_codec(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder, part="codec", parts_of=lambda config: [PART])


def write(folder: Path, **codec: Any) -> Any:
    """Write a random CSM whose sound is audible, within the range of samples.

    Transformers initializes codebooks with zeros.
    """
    torch.manual_seed(0)
    with quiet_config_log():
        model = CsmForConditionalGeneration(make_config(**codec)).eval()
    for name, buffer in model.codec_model.quantizer.named_buffers():
        if name.endswith(("embed_sum", "cluster_usage")):
            nn.init.uniform_(buffer, 0.5, 2.0) if "usage" in name else nn.init.normal_(buffer)
    last = model.codec_model.decoder.decoder_seanet.layers[-1].conv
    with torch.no_grad():
        last.bias.zero_()
        codes = torch.randint(NUM_CODES, (1, 4, 25))
        last.weight.div_(3 * model.codec_model.decode(codes).audio_values.abs().max())
    model.save_pretrained(folder)
    return model.codec_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("csm")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return write(folder)


@pytest.fixture(scope="module")
def codec(folder: Path, reference: Any) -> MimiCodec:
    return MimiCodec(open_codec(folder), CPU)


def some_codes(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(NUM_CODES, (length, 4), generator=generator)


@torch.no_grad()
def sound_of(reference: Any, codes: Tensor) -> Tensor:
    sound: Tensor = reference.decode(codes.T[None]).audio_values
    assert sound.std() > 0.02 and sound.abs().max() < 1
    return sound.flatten()


def test_attributes_of_the_codec(codec: MimiCodec) -> None:
    assert (codec.sampling_rate, codec.samples_per_code, codec.num_missing) == (24_000, 96, 0)
    assert (codec.num_codes, codec.num_codebooks, codec.max_codes) == (NUM_CODES, 4, 100)


@pytest.mark.parametrize(
    "lengths", [[1], [2], [3], [4], [25], [1] * 21, [1, 2, 3, 4, 5, 6], [8, 13], [20, 1]]
)
def test_sound_is_that_of_transformers(
    lengths: list[int], codec: MimiCodec, reference: Any
) -> None:
    codes = some_codes(sum(lengths))
    expected = sound_of(reference, codes)
    torch.testing.assert_close(in_chunks(codec, codes, lengths), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 1},
        {"use_conv_shortcut": True, "num_residual_layers": 2},
        {"frame_rate": 125.0, "num_semantic_quantizers": 2},
        {"vector_quantization_hidden_dimension": 16, "codebook_dim": 16},
    ],
)
def test_other_configs_of_the_codec(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = write(tmp_path, **changes)
    codec, codes = MimiCodec(open_codec(tmp_path), CPU), some_codes(15)
    samples = in_chunks(codec, codes, [1, 2, 3, 4, 5])
    torch.testing.assert_close(samples, sound_of(reference, codes), atol=1e-4, rtol=0)


def test_utterances_at_different_places_run_together(codec: MimiCodec) -> None:
    heard = [0, 0, 1, 2, 5, 9, 5]
    states = run_together(codec, some_codes, heard)
    assert [state[0] for state in states] == [start + 3 for start in heard]


def load_encoder(folder: Path, dtype: torch.dtype = torch.float32) -> MimiEncoder:
    """Load the encoder from the whole checkpoint, as a backbone does."""
    checkpoint = Checkpoint.open(folder)
    config: Any = checkpoint.config
    settings = ModelSettings(dtype, CPU, 16, 64)
    encoder = MimiEncoder(config.codec_config, config.num_codebooks, settings)
    targets = dict(encoder.targets("codec_model."))
    stored = checkpoint.weight_files
    ignored = set(names_of_half("decoder", stored, "codec_model."))
    ignored |= {name for name in stored if not name.startswith("codec_model.")}
    checkpoint.load_into(targets, ignored=ignored)
    return encoder


@pytest.mark.parametrize("num_samples", [1, 95, 96, 97, 2000])
def test_codes_of_sound_are_those_of_transformers(
    num_samples: int, folder: Path, reference: Any
) -> None:
    encoder = load_encoder(folder, torch.bfloat16)  # it stays in float32
    samples = torch.randn(num_samples, generator=torch.Generator().manual_seed(1))
    codes = encoder(samples)
    with torch.no_grad():
        expected = reference.encode(samples[None, None]).audio_codes[0, :4].T
    assert codes.dtype == torch.int64 and codes.shape == (
        encoder.num_rows({"input_values": samples}),
        4,
    )
    assert torch.equal(codes, expected)
    assert num_samples < 2000 or len(codes.unique()) > NUM_CODES // 2


def test_each_half_holds_its_own_weights(folder: Path, codec: MimiCodec) -> None:
    encoder = load_encoder(folder).module
    assert encoder.decoder is None and codec.network.encoder is None
    stored = open_codec(folder).weight_files
    decoding, encoding = (set(names_of_half(half, stored)) for half in ("decoder", "encoder"))
    rest = stored.keys() - decoding - encoding
    own = open_codec(folder).weights(decoding | rest)
    assert codec.nbytes == sum(tensor.nbytes for _, tensor in own)
    assert decoding and encoding and all(name.startswith("quantizer.") for name in rest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_causal_conv": False}, "use_causal_conv must be True, got False"),
        ({"trim_right_ratio": 0.5}, "trim_right_ratio must be 1.0, got 0.5"),
        ({"pad_mode": "replicate"}, "pad_mode must be 'constant', got 'replicate'"),
        ({"audio_channels": 2}, "audio_channels must be 1, got 2"),
        ({"frame_rate": 500.0}, "rate 500 or less, got 500.0"),
        ({"num_quantizers": 3}, "num_codebooks=4; its codec has 1 to 3"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type must be 'default', got 'dynamic'",
        ),
    ],
)
def test_configs_that_would_sound_wrong_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with quiet_config_log():
        config: Any = make_config(**changes)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        MimiCodec(open_codec(tmp_path), CPU)
    with pytest.raises(ValueError, match=message):
        MimiEncoder(config.codec_config, 4, ModelSettings(torch.float32, CPU, 16, 64))


def test_weights_that_no_half_has_are_refused(folder: Path, reference: Any) -> None:
    checkpoint = open_codec(folder)
    checkpoint.__dict__["weight_files"] = {**checkpoint.weight_files, "extra.weight": "x"}
    with pytest.raises(ValueError, match=r"no place for: extra\.weight"):
        MimiCodec(checkpoint, CPU)
