"""Generator stage: inputs, audio output, unsupported features."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from engine import CodecPrompt, FinishReason, GenerationParams, GeneratorConfig
from engine.resources.memory_plan import format_bytes
from stages import GeneratorStage, StageOutput, StageRequest
from tests.support.vocoder_reference import VocoderReference, random_codes

PARAMS = GenerationParams(num_steps=2)


@pytest.fixture(scope="module")
def folder(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_omni")


@pytest.fixture
def stage(folder: str) -> GeneratorStage:
    config = GeneratorConfig(model=folder, part="code2wav", device="cpu", generation=PARAMS)
    return GeneratorStage("code2wav", config)


def drain(stage: GeneratorStage) -> list[StageOutput]:
    outputs: list[StageOutput] = []
    while stepped := stage.step():
        stage.check_integrity()
        outputs += stepped
    return outputs


def test_audio_equals_transformers(stage: GeneratorStage, folder: str) -> None:
    codes = random_codes(13)
    stage.add_request(StageRequest("a", CodecPrompt(codes, "Ethan")))
    (output,) = drain(stage)
    assert (output.stage, output.finished, output.error) == ("code2wav", True, None)
    assert output.finish_reason is FinishReason.STOP
    assert (output.num_prompt_tokens, output.num_cached_tokens) == (13, 0)
    assert output.text is None and not output.tensors and not output.token_ids
    expected = VocoderReference(folder).waveform(codes, PARAMS, "Ethan")
    torch.testing.assert_close(output.audio.samples, expected, atol=1e-6, rtol=0)
    assert output.metrics.queue_s is not None and output.metrics.total_s is not None
    assert output.metrics.total_s >= output.metrics.queue_s >= 0


@pytest.mark.parametrize("num_first", [0, 20])
def test_speech_from_cut_off_codes_finishes_with_length(
    stage: GeneratorStage, num_first: int
) -> None:
    codes = random_codes(30)
    cut_off = CodecPrompt(codes[num_first:], is_cut_off=True)
    if num_first:
        stage.add_request(StageRequest("a", CodecPrompt(codes[:num_first], is_last=False)))
        drain(stage)
        stage.extend_request("a", cut_off)
    else:
        stage.add_request(StageRequest("a", cut_off))
    output = drain(stage)[-1]
    assert (output.finished, output.finish_reason) == (True, FinishReason.LENGTH)


def test_a_failed_request_reports_its_error_and_has_no_audio(
    stage: GeneratorStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(stage.engine._model, "forward", fail)
    stage.add_request(StageRequest("a", CodecPrompt((1, 2))))
    (output,) = stage.step()
    assert output.finished and output.finish_reason is FinishReason.ERROR
    assert output.error == "the generator failed: RuntimeError: no device"
    assert output.audio is None and output.audio_delta is None


def test_nothing_is_cached_with_caching_on_or_off(stage: GeneratorStage) -> None:
    sounds = []
    for switch in (True, True, False):
        stage.enable_prefix_caching = switch
        assert stage.enable_prefix_caching is switch
        stage.add_request(StageRequest("a", CodecPrompt(random_codes(9))))
        (output,) = drain(stage)
        sounds.append(output.audio.samples)
        assert output.num_cached_tokens == 0
    stage.reset_prefix_cache()
    assert all(torch.equal(sound, sounds[0]) for sound in sounds)
    assert (stage.stats().prompt_tokens, stage.stats().cached_tokens) == (27, 0)
    assert stage.stats().num_steps == 3 and stage.stats().busy_s > 0


def test_the_stage_describes_itself_and_loads_only_its_weights(
    stage: GeneratorStage, folder: str
) -> None:
    assert stage.takes_chunks and not stage.gives_chunks
    assert stage.speakers == ("Chelsie", "Ethan")
    assert stage.final_output == ("audio",)
    assert (stage.dtype, stage.hidden_size, stage.sampling) == (torch.float32, None, None)
    described = stage.describe()
    assert described["engine"] == "GeneratorEngine"
    assert described["window"] == ("4 to 32 codes (0.08 to 0.64 s), with 8 before and 4 after")
    assert not stage.has_cache
    with pytest.raises(ValueError, match="takes no sampling parameters"):
        stage.check_sampling(stage.merge_sampling({"temperature": 1.0}))
    whole = load_file(f"{folder}/model.safetensors")
    own = [tensor.nbytes for name, tensor in whole.items() if name.startswith("token2wav.")]
    (line,) = described["memory"]
    assert line == f"weights        {format_bytes(sum(own))} (float32 on cpu)"


def test_the_only_final_output_is_audio(folder: str) -> None:
    config = GeneratorConfig(model=folder, part="code2wav", device="cpu")
    with pytest.raises(ValueError, match=r"cannot be \['text'\]; what the stage makes is audio"):
        GeneratorStage("s", config, final_output=("audio", "text"))
    with pytest.raises(ValueError, match="final_output cannot be"):
        GeneratorStage("s", config, final_output=("video",))
