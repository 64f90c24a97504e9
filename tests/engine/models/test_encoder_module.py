"""Modules of transformers are made without memory, and computed buffers come out as they are."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
)

from engine.models.base import ModelSettings
from engine.models.encoder_module import build_empty, make_unplaced, place

CPU = torch.device("cpu")
META = torch.device("meta")


def test_buffers_are_those_of_transformers_and_weights_have_their_places():
    config = AutoConfig.for_model("qwen2_5_omni").token2wav_config.bigvgan_config
    config.upsample_initial_channel = 64
    expected = Qwen2_5OmniToken2WavBigVGANModel(config)
    for device in (META, CPU):
        settings = ModelSettings(torch.float32, device, 4, 64)
        found = build_empty(Qwen2_5OmniToken2WavBigVGANModel, config, settings)
        places = {name: (each.shape, each.dtype) for name, each in expected.state_dict().items()}
        assert places == {
            name: (each.shape, each.dtype) for name, each in found.state_dict().items()
        }
        assert {each.device for each in found.parameters()} == {device}
    buffers = dict(expected.named_buffers())
    assert buffers
    for name, buffer in found.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_what_was_placed_without_memory_can_be_placed_with_some():
    config = AutoConfig.for_model("qwen2_5_omni").token2wav_config.bigvgan_config
    config.upsample_initial_channel = 64
    made = make_unplaced(Qwen2_5OmniToken2WavBigVGANModel, config)
    for device in (META, CPU):
        found = place(made, ModelSettings(torch.float32, device, 4, 64))
        assert found is made and not found.training
        assert {each.device for each in found.state_dict().values()} == {device}
    expected = Qwen2_5OmniToken2WavBigVGANModel(config)
    for (name, buffer), other in zip(found.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, other), name


def test_what_is_made_afterwards_is_filled_as_ever():
    settings = ModelSettings(torch.float32, META, 4, 64)
    config = AutoConfig.for_model("qwen2_5_omni").token2wav_config.bigvgan_config
    build_empty(Qwen2_5OmniToken2WavBigVGANModel, config, settings)
    layer = nn.Linear(8, 8)
    assert layer.weight.std() > 0 and torch.isfinite(layer.weight).all()
