"""Helpers of tests of models that sample audio frame by frame: codec inputs and speech."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine import EngineConfig, LLMEngine, Prompt, RequestOutput
from omni import Omni, OmniRequest, SamplingParams
from tests.support.thinker_reference import tone

SETTINGS: tuple[dict[str, Any], ...] = (
    {"block_size": 4},
    {"block_size": 16},
    {"max_num_batched_tokens": 8, "max_num_seqs": 8, "enable_prefix_caching": False},
    {"num_blocks": 30, "max_model_len": 100, "max_num_seqs": 3},
    {"num_blocks": 30, "max_model_len": 100, "max_num_seqs": 3, "preemption": "swap"},
)
"""Engine settings whose frames equal those of transformers."""


def sound(seconds: float) -> Any:
    return tone(seconds, rate=24_000)


def engine_for(folder: str, **settings: Any) -> LLMEngine:
    usual: dict[str, Any] = {"block_size": 4, "max_model_len": 128, "dtype": "float32"}
    return LLMEngine(EngineConfig(model=folder, **usual | settings))


def drawn(output: RequestOutput, name: str) -> Tensor:
    """Return the rows that came with generated tokens."""
    assert output.error is None
    rows: Tensor = output.outputs[0].tensors[name]
    return rows[len(output.prompt_token_ids) :]


def asked(prompt: Prompt, **sampling: Any) -> OmniRequest:
    params = SamplingParams(**{"temperature": 0.0} | sampling)
    return OmniRequest(prompt, sampling={"backbone": params})


def samples_of(omni: Omni, request: OmniRequest) -> Tensor:
    """Return the whole audio of a request."""
    (output,) = omni.generate([request])
    audio = output.stages["codec"].audio
    assert audio is not None and audio.sampling_rate == 24_000
    return audio.samples


def check_speech(omni: Omni, request: OmniRequest, expected: Tensor) -> None:
    """Check that the audio is the expected one, both in growing pieces and whole."""
    pieces = [
        delta.samples
        for output in omni.stream([request])
        if "codec" in output.stages and (delta := output.stages["codec"].audio_delta) is not None
    ]
    for samples in (samples_of(omni, request), torch.cat(pieces)):
        torch.testing.assert_close(samples, expected, atol=1e-4, rtol=0)
    assert [len(piece) // 1920 for piece in pieces if len(piece)][:3] == [1, 2, 4]
