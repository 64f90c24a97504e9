"""CSM's frames and sound are those of transformers, with a recording and without, cold and warm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.csm.modeling_csm import CsmForConditionalGeneration
from transformers.models.csm.processing_csm import CsmProcessor
from transformers.models.encodec.feature_extraction_encodec import EncodecFeatureExtractor

from engine import (
    AudioPrompt,
    ChatPrompt,
    GeneratorEngine,
    LLMEngine,
    Prompt,
    TextPrompt,
)
from engine.interface.config import GenerationParams, GeneratorConfig, StreamWindow
from omni import Omni, OmniRequest, SamplingParams
from omni.seeded.checkpoints import resolve_model
from omni.seeded.speech import build_csm
from tests.support import frame_parity
from tests.support.frame_parity import SETTINGS, asked, check_speech, drawn, samples_of, sound

NUM_FRAMES = 14


def say(text: str, speaker: int = 0, *, heard: bool = False) -> Mapping[str, Any]:
    sound = [{"type": "audio"}] if heard else []
    return {"role": str(speaker), "content": [{"type": "text", "text": text}, *sound]}


SAID = say("What was said, in a few words.", heard=True)
OTHER = say("And what the other one said.", 1, heard=True)
TALKS: Mapping[str, tuple[tuple[Mapping[str, Any], ...], tuple[float, ...]]] = {
    "text": ((say("The harbour wakes."),), ()),
    "other speaker": ((say("The harbour wakes.", 1),), ()),
    "recording": ((SAID, say("Say this.")), (1.0,)),
    "two recordings": ((SAID, OTHER, say("Say this.")), (1.0, 0.63)),
}


class Reference:
    """Transformers' model, its processor and its greedy frames."""

    def __init__(self, folder: str) -> None:
        self.model = CsmForConditionalGeneration.from_pretrained(folder).eval()
        self.num_codebooks = self.model.config.num_codebooks
        tokenizer = AutoTokenizer.from_pretrained(folder)
        extractor = EncodecFeatureExtractor.from_pretrained(folder)
        self.processor = CsmProcessor(extractor, tokenizer, tokenizer.chat_template)

    def inputs(self, name: str) -> Mapping[str, Tensor]:
        messages, seconds = TALKS[name]
        text = self.processor.tokenizer.apply_chat_template(list(messages), tokenize=False)
        sounds = [sound(length) for length in seconds] or None
        inputs: Mapping[str, Tensor] = self.processor(
            text=text, audio=sounds, add_special_tokens=False, return_tensors="pt"
        )
        return inputs

    def frames(self, name: str) -> Tensor:
        """Return ``(n, num_codebooks)``, including the frame that ends them."""
        frames: Tensor = self.model.generate(
            **self.inputs(name),
            max_new_tokens=NUM_FRAMES,
            do_sample=False,
            depth_decoder_do_sample=False,
        )
        return frames[0]

    def sound(self, frames: Tensor) -> Tensor:
        with torch.no_grad():
            samples: Tensor = self.model.codec_model.decode(frames.T[None]).audio_values
        return samples.flatten()


def prompt_of(name: str) -> Prompt:
    messages, seconds = TALKS[name]
    sounds = [AudioPrompt(sound(length), 24_000) for length in seconds]
    return ChatPrompt(messages, multi_modal_data={"audio": sounds} if sounds else {})


@pytest.fixture(scope="module")
def folder() -> str:
    return resolve_model("seeded:csm")


@pytest.fixture(scope="module")
def reference(folder: str) -> Reference:
    return Reference(folder)


def engine_for(folder: str, **settings: Any) -> LLMEngine:
    return frame_parity.engine_for(folder, part="backbone", **settings)


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_FRAMES)


@pytest.mark.shows("parity", "prefix hits", "audio", of="csm")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_frames_are_those_of_transformers(
    folder: str, reference: Reference, settings: dict[str, Any]
) -> None:
    engine = engine_for(folder, **settings)
    expected = {name: reference.frames(name) for name in TALKS}
    for _ in range(2):
        outputs = engine.generate([prompt_of(name) for name in TALKS], [GREEDY] * len(TALKS))
        for name, output in zip(TALKS, outputs, strict=True):
            ids = reference.inputs(name)["input_ids"][0].tolist()
            assert list(output.prompt_token_ids) == ids, name
            assert torch.equal(drawn(output, "codes"), expected[name]), name
        engine.check_integrity()
    if engine.enable_prefix_caching:
        assert engine.stats().cached_tokens > 0
    assert len({tuple(map(tuple, frames.tolist())) for frames in expected.values()}) == len(TALKS)


@pytest.mark.shows("hidden states", of="csm")
def test_hidden_states_are_those_of_transformers(folder: str, reference: Reference) -> None:
    (output,) = engine_for(folder).generate([prompt_of("recording")], [GREEDY])
    inputs = reference.inputs("recording")
    with torch.no_grad():
        states = reference.model(**inputs, output_hidden_states=True).hidden_states[-1][0]
    mine = output.outputs[0].tensors["hidden_states"][: len(states)]
    torch.testing.assert_close(mine, states, atol=1e-4, rtol=0)


def test_text_is_that_of_speaker_0(folder: str) -> None:
    engine = engine_for(folder)
    prompts: list[Prompt] = [
        "Say this.",
        TextPrompt("[0]Say this."),
        ChatPrompt(({"role": "user", "content": "Say this."},)),
        ChatPrompt((say("Say this."),)),
    ]
    outputs = engine.generate(prompts, [GREEDY] * len(prompts))
    assert len({output.prompt_token_ids for output in outputs}) == 1
    with pytest.raises(ValueError, match="number of who speaks, such as '0', got 'system'"):
        engine.generate([ChatPrompt(({"role": "system", "content": "x"},))], [GREEDY])
    whole = outputs[0].prompt_token_ids
    for length in (100, len(whole) - 1):
        cut = SamplingParams(temperature=0.0, max_tokens=2, truncate_prompt_tokens=length)
        (output,) = engine.generate(["Say this."], [cut])
        assert output.prompt_token_ids == whole[-length:]


def test_what_is_to_be_said_has_no_sound(folder: str) -> None:
    engine = engine_for(folder)
    heard = {"audio": [AudioPrompt(sound(0.5), 24_000)]}
    last: list[Prompt] = [
        ChatPrompt((say("Say this.", heard=True),), multi_modal_data=heard),
        AudioPrompt(sound(0.5), 24_000),
    ]
    for prompt in last:
        with pytest.raises(ValueError, match="as an earlier message, as ref_audio and ref_text"):
            engine.generate([prompt], [GREEDY])
    with pytest.raises(ValueError, match="0 audio placeholders .* 1 audio items"):
        engine.generate([TextPrompt("Say this.", multi_modal_data=heard)], [GREEDY])


def test_a_frame_of_zeros_in_all_codebooks_but_the_last_ends_the_speech(tmp_path: Path) -> None:
    usual = Reference(str(build_csm(tmp_path / "usual", num_codebooks=2, **_depth(2))))
    end = int(usual.frames("text")[4, 0])
    path = str(
        build_csm(tmp_path / "ended", num_codebooks=2, codebook_eos_token_id=end, **_depth(2))
    )
    expected = Reference(path).frames("text")
    (output,) = engine_for(path).generate([prompt_of("text")], [GREEDY])
    assert len(expected) < NUM_FRAMES
    assert expected[-1, 0] == end
    assert output.outputs[0].finish_reason == "stop"
    assert torch.equal(drawn(output, "codes"), expected[:-1])


def _depth(num_codebooks: int) -> dict[str, Any]:
    from omni.seeded import speech

    depth = speech._CSM_SIZES | {"backbone_hidden_size": 64, "num_codebooks": num_codebooks}
    return {"depth_decoder_config": depth | {"max_position_embeddings": 33}}


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    with Omni("csm_seeded") as made:
        yield made


def request(name: str, **sampling: Any) -> OmniRequest:
    return asked(prompt_of(name), **{"max_tokens": NUM_FRAMES} | sampling)


@pytest.mark.parametrize("num_frames", [1, 2])
def test_a_limit_counts_frames_of_sound(num_frames: int, omni: Omni) -> None:
    (output,) = omni.generate([request("text", max_tokens=num_frames)])
    audio = output.stages["codec"].audio
    assert audio is not None and len(audio.samples) == 1920 * num_frames
    assert output.stages["codec"].finish_reason == "length"


def test_settings_that_a_codec_does_not_read_are_refused(folder: str) -> None:
    settings = GenerationParams(seed=3, window=StreamWindow(first_blocks=2))
    with pytest.raises(ValueError, match=r"has no flow that generation.seed could change"):
        GeneratorEngine(GeneratorConfig(model=folder, part="mimi", generation=settings))


@pytest.mark.shows("streaming", of="csm")
@pytest.mark.parametrize("name", TALKS)
def test_speech_equals_transformers_in_pieces_and_whole(
    name: str, omni: Omni, reference: Reference
) -> None:
    expected = reference.sound(reference.frames(name))
    check_speech(omni, request(name), expected)


def test_a_seed_decides_all_codebooks(omni: Omni) -> None:
    def frames(seed: int) -> Tensor:
        return samples_of(omni, request("text", temperature=0.9, seed=seed))

    torch.testing.assert_close(frames(1), frames(1), atol=1e-6, rtol=0)
    assert (frames(1) - frames(2)).abs().max() > 1e-3
