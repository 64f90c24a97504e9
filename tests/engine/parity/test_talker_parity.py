"""The talker equals transformers' talker, given the rows of transformers' thinker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, SpeechPrompt
from tests.support.omni_reference import OmniReference
from tests.support.omni_stages import SUPPRESSED
from tests.support.pictures import picture
from tests.support.speech import spoken

NUM_CODES = 24


@dataclass(frozen=True)
class Ask:
    """One conversation; images and sounds are given by seeds."""

    messages: Sequence[Mapping[str, Any]]
    images: tuple[int, ...] = ()
    sounds: tuple[int, ...] = ()
    speaker: str = "Chelsie"
    penalty: float = 1.0


@dataclass(frozen=True)
class Case:
    prompt: SpeechPrompt
    params: SamplingParams
    codes: tuple[int, ...]


def user(text: str, *shown: str) -> dict[str, Any]:
    parts = [{"type": kind} for kind in shown]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


SYSTEM = {"role": "system", "content": "You are a voice."}
ASKS = {
    "text": Ask((SYSTEM, user("say something"))),
    "other voice": Ask((SYSTEM, user("say something")), speaker="Ethan"),
    "penalty": Ask((SYSTEM, user("say it again and again")), penalty=1.05),
    "image": Ask((SYSTEM, user("what is it?", "image")), images=(1,)),
    "sound": Ask((SYSTEM, user("who is it?", "audio")), sounds=(2,), penalty=1.05),
    "both": Ask((user("and now?", "audio", "image"),), images=(3,), sounds=(4,)),
}


def sound(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(0, 0.1, 8000).astype(np.float32)


@pytest.fixture(scope="module")
def folder(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_omni")


@pytest.fixture(scope="module")
def reference(folder: str) -> OmniReference:
    return OmniReference(
        folder, num_codes=NUM_CODES, num_text=10, num_steps=1, suppressed=SUPPRESSED
    )


@pytest.fixture(scope="module")
def cases(reference: OmniReference) -> dict[str, Case]:
    found = {}
    for name, ask in ASKS.items():
        shown = [picture(seed) for seed in ask.images], [sound(seed) for seed in ask.sounds]
        answer = reference.answer(
            ask.messages, *shown, speaker=ask.speaker, repetition_penalty=ask.penalty
        )
        inputs = reference.inputs(ask.messages, *shown)
        found[name] = Case(
            spoken(reference.model, inputs, answer.text_ids, ask.speaker),
            SamplingParams(temperature=0.0, max_tokens=NUM_CODES, repetition_penalty=ask.penalty),
            answer.codes,
        )
    return found


def engine_for(folder: str, **settings: Any) -> LLMEngine:
    config: dict[str, Any] = {"block_size": 4, "max_model_len": 256, "max_num_seqs": 8}
    return LLMEngine(EngineConfig(model=folder, part="talker", **(config | settings)))


def codes(output: RequestOutput) -> tuple[int, ...]:
    """Return the codes that a vocoder receives."""
    first = output.outputs[0]
    assert output.error is None
    return first.token_ids[:-1] if first.finish_reason == "stop" else first.token_ids


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 4},
        {"block_size": 16},
        {"max_num_batched_tokens": 9, "enable_prefix_caching": False},
        {"num_blocks": 30, "max_model_len": 100},
        {"num_blocks": 30, "max_model_len": 100, "preemption": "swap"},
    ],
    ids=str,
)
def test_codes_are_those_of_transformers(
    folder: str, cases: dict[str, Case], settings: dict[str, Any]
) -> None:
    engine = engine_for(folder, **settings)
    for _ in range(2):
        prompts = [case.prompt for case in cases.values()]
        outputs = engine.generate(prompts, [case.params for case in cases.values()])
        for (name, case), output in zip(cases.items(), outputs, strict=True):
            assert codes(output) == case.codes, name
        engine.check_integrity()
    if engine.enable_prefix_caching:
        assert engine.stats().cached_tokens > 0


def test_references_differ_and_images_are_not_placed_by_index(cases: dict[str, Case]) -> None:
    """Guards the test above against being vacuous."""
    assert len({case.codes for case in cases.values()}) == len(cases)
    assert all(len(set(case.codes)) > 5 for case in cases.values())
    for name, case in cases.items():
        table = case.prompt.positions
        assert table is not None
        indices = torch.arange(table.shape[1]).expand_as(table)
        assert torch.equal(table, indices) != bool(ASKS[name].images)


def test_hidden_states_are_those_of_transformers(
    folder: str, reference: OmniReference, cases: dict[str, Case]
) -> None:
    case = cases["image"]
    (output,) = engine_for(folder).generate([case.prompt], case.params)
    expected = talker_hidden_states(reference, case, output.outputs[0].token_ids)
    ours = output.outputs[0].tensors["hidden_states"]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def talker_hidden_states(reference: OmniReference, case: Case, generated: Sequence[int]) -> Tensor:
    """Compute all rows in one pass of transformers' talker, with inputs built here."""
    model, config = reference.model, reference.model.config.talker_config
    speaker = model.speaker_map[case.prompt.speaker]["bos_token"]
    text = model.thinker.get_input_embeddings().weight
    stream = [*case.prompt.reply_rows, text[config.tts_text_end_token_id]]
    stream += [text[config.tts_text_pad_token_id]] * len(generated)
    beside = torch.stack([text[speaker], *stream[: len(generated)]])
    ids = [config.tts_codec_pad_token_id, config.tts_codec_start_token_id, *generated[:-1]]
    embeds = model.talker.get_input_embeddings()(torch.tensor(ids)) + beside
    rows = torch.cat([case.prompt.prompt_rows, embeds])[None]
    table = case.prompt.positions
    assert table is not None
    after = torch.arange(len(ids)) + int(table.max()) + 1
    places = torch.cat([table, after.expand(3, -1)], dim=1)[:, None]
    hidden: Tensor = model.talker.model(
        inputs_embeds=model.talker.thinker_to_talker_proj(rows), position_ids=places
    ).last_hidden_state[0]
    return hidden


def test_a_later_turn_hits_the_blocks_of_the_earlier(folder: str, reference: OmniReference) -> None:
    first = [SYSTEM, user("what is it?", "image"), user("tell me more")]
    engine = engine_for(folder)
    uncached = engine_for(folder, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_CODES)
    inputs = reference.inputs(first, [picture(1)])
    later = spoken(reference.model, inputs, list(range(20, 30)))
    # A thinker's rows of the first turn are the same in the later turn, from its cache.
    num_first = later.prompt_rows.shape[0] - 9
    assert later.positions is not None
    earlier = SpeechPrompt(
        later.prompt_rows[:num_first], later.reply_rows[:4], later.positions[:, :num_first]
    )
    engine.generate(earlier, params)
    (again,) = engine.generate(later, params)
    assert again.num_cached_tokens == num_first // 4 * 4
    assert codes(again) == codes(uncached.generate(later, params)[0])
