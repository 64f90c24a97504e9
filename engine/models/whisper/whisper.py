"""Whisper: an encoder over the spectrogram of a window of fixed length, learned positions.

Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.encoder_decoder_inputs import EncoderDecoderPromptProcessor
from engine.inputs.encoder_inputs import AudioEncoderInputs
from engine.inputs.prompt_processor import PromptSources
from engine.media.audio_samples import load_extractor
from engine.models.base import ModelSettings
from engine.models.encoder_module import EncoderModule, build_empty
from engine.models.family import ModelFamily
from engine.models.seq2seq.seq2seq import FAIRSEQ_NAMES, Seq2SeqConfig, Seq2SeqModel
from engine.models.whisper.whisper_prompt import WhisperPromptRule
from engine.requests.encoder_input import EncoderInput

__all__ = ["FAMILY"]

_NAMES = replace(FAIRSEQ_NAMES, head="proj_out.weight", final_norm="layer_norm")
_FEATURES = "input_features"
# Frames of the spectrogram per row: the second convolution takes every second one.
_FRAMES_PER_ROW = 2


class SpeechEncoder(EncoderModule):
    """Spectrograms to hidden states, always of the whole window."""

    def __init__(self, config: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__()
        self.module = build_empty(WhisperEncoder, config, settings)
        self.max_len = config.max_source_positions
        self.dtype = settings.dtype
        self.feature_shape = (config.num_mel_bins, self.max_len * _FRAMES_PER_ROW)

    def check_input(self, entry: EncoderInput) -> None:
        """One spectrogram, padded or cut to the window."""
        features = entry.features.get(_FEATURES)
        if features is None or entry.token_ids:
            raise ValueError(f"Whisper's encoder takes {_FEATURES} (a spectrogram) and no tokens")
        if tuple(features.shape) != self.feature_shape:
            raise ValueError(
                f"{_FEATURES} must be {self.feature_shape} (mel bins, frames), "
                f"got {tuple(features.shape)}"
            )
        self.check_num_tokens(entry, self.max_len)

    def forward(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """See :meth:`EncoderModule.forward`."""
        features = self.stacked_feature(inputs, _FEATURES).to(self.dtype)
        rows: Tensor = self.module(features).last_hidden_state.flatten(0, 1)
        return rows


def whisper_config(config: PreTrainedConfig) -> Seq2SeqConfig:
    """The decoder's part of a config."""
    query, _, value, output = _NAMES.projections
    return Seq2SeqConfig.of_fairseq(
        config,
        config.max_target_positions,
        config.max_source_positions,
        norm_first=True,
        projection_biases=(query, value, output),
        position_offset=0,
        names=_NAMES,
    )


def build_whisper(checkpoint: Checkpoint, settings: ModelSettings) -> Seq2SeqModel:
    """Build a Whisper, its weights not yet loaded; see :class:`Seq2SeqModel`."""
    config = checkpoint.config
    return Seq2SeqModel(
        whisper_config(config),
        lambda _: SpeechEncoder(config, settings),
        settings,
        checkpoint.weight_files,
    )


def _speech_inputs(sources: PromptSources) -> AudioEncoderInputs:
    path, trust = sources.checkpoint.path, sources.checkpoint.trust_remote_code
    extractor = load_extractor(path, trust_remote_code=trust)
    return AudioEncoderInputs(sources.model, extractor, sources.media_limits)


FAMILY = ModelFamily(
    "whisper",
    ("WhisperForConditionalGeneration",),
    build=build_whisper,
    prompts=partial(
        EncoderDecoderPromptProcessor, encoder_inputs=_speech_inputs, decoder_rule=WhisperPromptRule
    ),
    max_positions=lambda config: whisper_config(config).max_position_embeddings,
)
