"""CSM's codec, Mimi: frames of codes to audio, chunk by chunk, and audio to frames.

The halves share the codebooks, and are loaded separately where needed. At the published config::

    MimiEncoder   24,000 samples ─► convolutions ─► decoder, 25 places ─► 12.5 frames of codes
    MimiCodec     24,000 samples ◄─ convolutions ◄─ decoder, 25 places ◄─ 12.5 frames of codes

Unlike in transformers' modules, the stored names of weights do not identify a half by prefix::

    stored      encoder.layers.0...           encoder_transformer...           downsample...
    module      encoder.encoder_seanet.la...  encoder.encoder_transformer...   encoder.downsample...

Source: Defossez et al., "Moshi: a speech-text foundation model for real-time dialogue", 2024;
transformers' ``mimi``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers.models.mimi.modeling_mimi import MimiConv1d, MimiConvTranspose1d, MimiModel

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import Target
from engine.inputs.multimodal_inputs import FeatureTaker
from engine.models.base import ModelSettings
from engine.models.causal_vocoder import CausalVocoder
from engine.models.encoder_module import ModelT, build_empty, load_network

Half: TypeAlias = Literal["encoder", "decoder"]

_CAUSAL = (MimiConv1d, MimiConvTranspose1d)
_SUPPORTED: Mapping[str, Any] = MappingProxyType(
    {"audio_channels": 1, "use_causal_conv": True, "trim_right_ratio": 1.0, "pad_mode": "constant"}
)


class MimiCodec(CausalVocoder):
    """The decoding half of a checkpoint's codec; see :class:`CausalVocoder`.

    Args:
        checkpoint: opened at its part ``mimi``.

    Raises:
        ValueError: the config is not supported, or the weights do not match it.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        config: Any = checkpoint.config
        super().__init__(device, config.sliding_window)
        whole: Any = checkpoint.whole_config
        self.num_codebooks, self.num_codes = whole.num_codebooks, config.codebook_size
        _check(config, self.num_codebooks)
        self.sampling_rate = config.sampling_rate
        self.samples_per_code = samples_per_frame(config)
        self.max_codes = config.max_position_embeddings // config.latent_stride
        ignored = names_of_half("encoder", checkpoint.weight_files)
        make = without("encoder", MimiModel)
        self.network = load_network(checkpoint, device, make, lambda x: dict(_targets(x)), ignored)
        self.stream_convolutions(self.network, _CAUSAL)

    def forward(self, codes: Tensor, starts: Tensor) -> Tensor:
        """See :meth:`CausalVocoder.forward`."""
        decoder = self.network.decoder
        hidden = decoder.upsample(self.network.quantizer.decode(codes)).transpose(1, 2)
        places = starts * decoder.config.latent_stride
        hidden = self.attend(decoder.decoder_transformer, hidden, places)
        return decoder.decoder_seanet(hidden.transpose(1, 2))


class MimiEncoder(nn.Module, FeatureTaker):
    """The encoding half of a codec, in float32, its weights not yet loaded: a tower for recordings.

    Args:
        config: the codec's; ``ValueError`` if it is not supported.
        num_codebooks: number of codebooks used, from the first.
    """

    feature_names = ("input_values",)

    def __init__(self, config: Any, num_codebooks: int, settings: ModelSettings) -> None:
        super().__init__()
        _check(config, num_codebooks)
        self.num_codebooks = num_codebooks
        self.sampling_rate = int(config.sampling_rate)
        self.samples_per_frame = samples_per_frame(config)
        # In a shorter type, other codes of similar distance might be selected.
        plain = ModelSettings(torch.float32, settings.device, 1, 1)
        self.module = build_empty(without("decoder", MimiModel), config, plain)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
        return _targets(self.module, prefix)

    def num_rows(self, features: Mapping[str, Tensor]) -> int:
        """See :meth:`FeatureTaker.num_rows`; the last frame is padded with silence."""
        return -(-len(features["input_values"]) // self.samples_per_frame)

    @torch.no_grad()
    def forward(self, samples: Tensor) -> Tensor:
        """Map audio ``(num_samples,)`` to codes ``(num_frames, num_codebooks)`` int64."""
        samples = samples.to(self.module.device, torch.float32)
        encoded = self.module.encode(samples[None, None], num_quantizers=self.num_codebooks)
        return encoded.audio_codes[0].T


def samples_per_frame(config: Any) -> int:
    """Return the number of audio samples per frame of codes."""
    return int(prod(config.upsampling_ratios) * config.latent_stride)


def names_of_half(half: Half, stored: Collection[str], prefix: str = "") -> list[str]:
    """Return the stored names of one half's weights, without those of the shared codebooks."""
    rate = {"encoder": "downsample", "decoder": "upsample"}[half]
    starts = tuple(f"{prefix}{name}." for name in (half, f"{half}_transformer", rate))
    return [name for name in stored if name.startswith(starts)]


def without(half: Half, codec: Callable[[Any], ModelT]) -> Callable[[Any], ModelT]:
    """Return a factory that builds a codec without one half; it changes the given config."""

    def make(config: Any) -> ModelT:
        setattr(config, f"{half}_config", None)
        return codec(config)

    return make


def _targets(network: MimiModel, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield stored names, each with the tensor to load it into; see the module docstring."""
    for name, tensor in network.state_dict().items():
        stored = name.removeprefix("encoder.").removeprefix("decoder.").replace("_seanet.", ".")
        yield f"{prefix}{stored}", tensor


def _check(config: Any, num_codebooks: int) -> None:
    check_codec(config)
    if not 1 <= num_codebooks <= config.num_quantizers:
        raise ValueError(
            f"the model has num_codebooks={num_codebooks}; its codec has 1 to "
            f"{config.num_quantizers}"
        )


def check_codec(config: Any) -> None:
    """Raise ``ValueError`` for a config whose results would be wrong."""
    for name, expected in _SUPPORTED.items():
        if getattr(config, name) != expected:
            raise ValueError(
                f"the codec's {name} must be {expected!r}, got {getattr(config, name)!r}"
            )
    rope_type = config.rope_parameters["rope_type"]
    if rope_type != "default":
        raise ValueError(f"the codec's rope_type must be 'default', got {rope_type!r}")
    if config.latent_stride < 2:
        raise ValueError(
            "the codec's frame_rate must be half of its convolutions' rate "
            f"{config.encodec_frame_rate} or less, got {config.frame_rate}"
        )
