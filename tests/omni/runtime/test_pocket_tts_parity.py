"""Pocket TTS's latents and sound are those of transformers, with and without voice, cold and warm.

The noise is 0 here, as in transformers when nothing is sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.pocket_tts.feature_extraction_pocket_tts import PocketTTSFeatureExtractor
from transformers.models.pocket_tts.modeling_pocket_tts import PocketTTSForConditionalGeneration
from transformers.models.pocket_tts.processing_pocket_tts import PocketTTSProcessor
from transformers.models.pocket_tts_audio_tokenizer import PocketTTSAudioTokenizerModel

from engine import (
    AudioPrompt,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
)
from omni import Omni, OmniRequest, SamplingParams
from omni.seeded.checkpoints import resolve_model
from omni.seeded.speech import build_pocket_codec, build_pocket_tts
from tests.support.frame_parity import (
    SETTINGS,
    asked,
    check_speech,
    drawn,
    engine_for,
    samples_of,
    sound,
)

NUM_FRAMES = 40
LONG = "The harbour wakes before the town does, and fishing boats come in with the tide."
# A voice's seconds, and the text: with few words there are more frames after the end.
TALKS: Mapping[str, tuple[float | None, str]] = {
    "few words": (None, "Say this."),
    "text": (None, LONG),
    "voice": (1.0, LONG),
    "other voice": (0.63, "Say this."),
}


class Reference:
    """Transformers' model, its processor and its codec."""

    def __init__(self, folder: str) -> None:
        self.model = PocketTTSForConditionalGeneration.from_pretrained(folder).eval()
        codec = PocketTTSAudioTokenizerModel.from_pretrained(f"{folder}/codec").eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        extractor = PocketTTSFeatureExtractor.from_pretrained(folder)
        self.processor = PocketTTSProcessor(extractor, tokenizer, codec, tokenizer.chat_template)

    def inputs(self, name: str) -> Mapping[str, Tensor]:
        seconds, _ = TALKS[name]
        text = self.processor.apply_chat_template([message(name)], tokenize=False)
        sounds = None if seconds is None else [sound(seconds)]
        inputs: Mapping[str, Tensor] = self.processor(text=text, audio=sounds, return_tensors="pt")
        return inputs

    def latents(self, name: str, num_frames: int = NUM_FRAMES, **settings: Any) -> Tensor:
        """Return ``(n, latent_dim)``, all latents that are decoded to sound."""
        latents: Tensor = self.model.generate(
            **self.inputs(name), max_new_tokens=num_frames, do_sample=False, **settings
        )[0]
        return latents


def message(name: str) -> Mapping[str, Any]:
    seconds, text = TALKS[name]
    voice = [] if seconds is None else [{"type": "audio"}]
    return {"role": "user", "content": [*voice, {"type": "text", "text": text}]}


def sounds(name: str) -> dict[str, Any]:
    seconds, _ = TALKS[name]
    return {} if seconds is None else {"audio": [AudioPrompt(sound(seconds), 24_000)]}


def prompt_of(name: str) -> Prompt:
    return ChatPrompt((message(name),), multi_modal_data=sounds(name))


@pytest.fixture(scope="module")
def folder() -> str:
    return resolve_model("seeded:pocket_tts")


@pytest.fixture(scope="module")
def reference(folder: str) -> Reference:
    return Reference(folder)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_FRAMES)


@pytest.mark.shows("parity", "prefix hits", "audio", of="pocket_tts")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_latents_are_those_of_transformers(
    folder: str, reference: Reference, settings: dict[str, Any]
) -> None:
    engine = engine_for(folder, **settings)
    expected = {name: reference.latents(name) for name in TALKS}
    for _ in range(2):
        outputs = engine.generate([prompt_of(name) for name in TALKS], [GREEDY] * len(TALKS))
        for name, output in zip(TALKS, outputs, strict=True):
            ids = reference.inputs(name)["input_ids"][0].tolist()
            assert list(output.prompt_token_ids) == ids, name
            close(drawn(output, "latents"), expected[name])
            assert output.outputs[0].finish_reason == "stop"
        engine.check_integrity()
    if engine.enable_prefix_caching:
        assert engine.stats().cached_tokens > 0
    assert len({len(latents) for latents in expected.values()}) > 1
    assert all(len(latents) < NUM_FRAMES for latents in expected.values())


@pytest.mark.shows("hidden states", of="pocket_tts")
def test_hidden_states_are_those_of_transformers(folder: str, reference: Reference) -> None:
    (output,) = engine_for(folder).generate([prompt_of("voice")], [GREEDY])
    inputs = {name: each for name, each in reference.inputs("voice").items() if "after" not in name}
    with torch.no_grad():
        states = reference.model.model(**inputs).last_hidden_state[0]
    close(output.outputs[0].tensors["hidden_states"][: len(states)], states)


def test_text_is_a_message_and_its_sound_the_voice(folder: str) -> None:
    engine = engine_for(folder)
    says = {"role": "user", "content": "Say this."}
    alone: list[Prompt] = ["Say this.", TextPrompt("Say this."), ChatPrompt((says,))]
    outputs = engine.generate([*alone, prompt_of("few words")], [GREEDY] * 4)
    assert len({output.prompt_token_ids for output in outputs}) == 1
    heard = TextPrompt("Say this.", multi_modal_data=sounds("other voice"))
    outputs = engine.generate([heard, prompt_of("other voice")], [GREEDY] * 2)
    close(drawn(outputs[0], "latents"), drawn(outputs[1], "latents"))
    with pytest.raises(ValueError, match="1 audio"):
        engine.generate([ChatPrompt((message("voice"),))], [GREEDY])
    with pytest.raises(ValueError, match=r"one message of a user, .* got messages of \['system'"):
        engine.generate([ChatPrompt(({"role": "system", "content": "x"}, says))], [GREEDY])
    cut = SamplingParams(temperature=0.0, max_tokens=2, truncate_prompt_tokens=3)
    (shorter,) = engine.generate(["Say this."], [cut])
    assert shorter.prompt_token_ids == engine.generate([alone[0]])[0].prompt_token_ids[-3:]


def test_a_prompt_of_ids_ends_as_its_words_do(folder: str, reference: Reference) -> None:
    ids = tuple(reference.inputs("few words")["input_ids"][0].tolist())
    outputs = engine_for(folder).generate([TokensPrompt(ids), "Say this."], [GREEDY] * 2)
    close(drawn(outputs[0], "latents"), drawn(outputs[1], "latents"))


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"attention_bias": True, "num_key_value_heads": 2}, {}),
        ({}, {"num_flow_steps": 3}),
        ({}, {"eos_threshold": -50.0, "min_frames_before_eos": 2}),
        ({}, {"eos_threshold": 50.0}),  # never over: a limit ends it
        ({"flow_head_config": {"flow_type": "drifting"}}, {}),
    ],
    ids=str,
)
def test_other_configs(changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    from omni.seeded import speech

    if head := changes.get("flow_head_config"):
        changes = {"flow_head_config": speech._POCKET_BACKBONE["flow_head_config"] | head}
    path = build_pocket_tts(tmp_path / "made", **changes)
    file = path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    reference = Reference(str(path))
    (output,) = engine_for(str(path)).generate([prompt_of("voice")], [GREEDY])
    close(drawn(output, "latents"), reference.latents("voice"))


@pytest.mark.parametrize("multiple", [None, 3840])
def test_a_voice_is_as_long_as_its_mask_says(
    multiple: int | None, folder: str, tmp_path: Path
) -> None:
    path = copytree(folder, tmp_path / "copy")
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_to_multiple_of": multiple}))
    (output,) = engine_for(str(path)).generate([prompt_of("other voice")], [GREEDY])
    close(drawn(output, "latents"), Reference(str(path)).latents("other voice"))


def test_without_its_codec_a_model_hears_no_voice(folder: str, tmp_path: Path) -> None:
    path = copytree(folder, tmp_path / "copy")
    (path / "processor_config.json").write_text("{}")
    engine = engine_for(str(path))
    (output,) = engine.generate(["Say this."], [GREEDY])
    assert len(drawn(output, "latents")) > 0
    with pytest.raises(ValueError, match="audio"):
        engine.generate([prompt_of("voice")], [GREEDY])
    named = {"audio_tokenizer": {"audio_tokenizer_name_or_path": "codec"}}
    (path / "processor_config.json").write_text(json.dumps(named))
    build_pocket_codec(path / "codec", latent_dim=4)
    with pytest.raises(ValueError, match="must have the model's latent_dim=8, got 4"):
        engine_for(str(path))


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    with Omni("pocket_tts_seeded") as made:
        yield made


def request(name: str, **sampling: Any) -> OmniRequest:
    return asked(prompt_of(name), **{"max_tokens": NUM_FRAMES} | sampling)


@pytest.mark.shows("streaming", of="pocket_tts")
@pytest.mark.parametrize("name", TALKS)
def test_speech_equals_transformers_in_pieces_and_whole(
    name: str, omni: Omni, reference: Reference
) -> None:
    expected = reference.processor.decode(reference.latents(name))
    check_speech(omni, request(name), expected)


def test_a_seed_decides_the_noise_and_a_temperature_its_variance(omni: Omni) -> None:
    def samples(**sampling: Any) -> Tensor:
        return samples_of(omni, request("text", max_tokens=6, **sampling))

    close(samples(temperature=0.7, seed=1), samples(temperature=0.7, seed=1))
    assert (samples(temperature=0.7, seed=1) - samples(temperature=0.7, seed=2)).abs().max() > 1e-3
    close(samples(temperature=1e-12, seed=1), samples())


def test_rows_in_bfloat16_sound_as_well(omni: Omni) -> None:
    """Latents, and what they are sampled from, are rounded on their way to the codec then."""
    (exact,) = omni.generate([request("few words")])
    with Omni("pocket_tts_seeded", overrides={"stages.backbone.engine.dtype": "bfloat16"}) as short:
        (rounded,) = short.generate([request("few words")])
    sounds = [each.stages["codec"].audio for each in (exact, rounded)]
    assert all(each is not None for each in sounds), rounded.error
    first = [each.samples[: 4 * 1920] for each in sounds if each is not None]
    assert float((first[0] - first[1]).norm() / first[0].norm()) < 0.3
