"""Thinkers of Qwen2.5-Omni and Qwen3-Omni through the whole engine, against transformers'."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams
from engine.execution.input_batch import ModelInputBuilder
from engine.models.base import ModelSettings
from engine.models.model_loader import load_model, open_checkpoint
from omni.seeded.omni import build_qwen3_omni
from tests.support.greedy_reference import NEAR_TIE
from tests.support.pictures import picture
from tests.support.thinker_reference import (
    Talk,
    ThinkerAnswer,
    ThinkerReference,
    clip,
    talkie,
    tone,
)

NUM_TOKENS = 10
BOTH = {
    "text": Talk(["The harbour wakes."]),
    "image": Talk([picture(0), "What is it?"]),
    "audio": Talk([tone(1.0), "Who speaks?"]),
    "audio of more than one piece": Talk([tone(2.13, 440.0), "Who speaks?"]),
    "audio of one row": Talk([tone(0.03), "Who?"]),
    "image and audio": Talk(["See", picture(1), "and hear", tone(0.4), "."]),
    "two images in a row": Talk([picture(0), picture(2), "Which?"]),
    "video longer than its sound": Talk([talkie(5, tone(0.9), 6, 1.0), "What happens?"]),
    "turns": Talk([picture(0), "What is it?"], ("A harbour.", "Are you sure?")),
}
TALKS = {
    "qwen2_5_omni": BOTH
    | {
        "audio and image": Talk([tone(0.41), picture(2), "?"]),
        "two sounds in a row": Talk([tone(0.3), tone(0.7, 200.0), "Which?"]),
        "video": Talk([clip(1), "What happens?"]),
        "video that runs ahead": Talk([clip(2, grids=3, seconds=0.87), "And?"]),
        "all": Talk([tone(0.5), clip(3), "then", picture(0), clip(4, grids=1), "?"]),
        "video with its sound": Talk([talkie(1, tone(0.6)), "What happens?"]),
        "sound longer than its video": Talk(["See", talkie(6, tone(4.6), 2), "And?"]),
        "video and sound of many chunks": Talk([talkie(7, tone(4.1), 3, 2.0), "And?"]),
        "grids that skip chunks": Talk([talkie(8, tone(1.5), 3, 5.0), "And?"]),
        "grids close together": Talk([talkie(9, tone(2.2), 8, 0.34), "And?"]),
        "video that runs beyond its last sound": Talk([talkie(3, tone(0.3), 3, 0.9), "And then?"]),
        "videos with sound among others": Talk(
            [tone(0.3), talkie(1, tone(0.7), 2), "then", picture(0), talkie(2, tone(2.5), 4, 1.0)]
        ),
    },
    # A position is 1/13 s; grids are whole numbers of them apart, as with published settings.
    "qwen3_omni": BOTH
    | {
        "video": Talk([clip(1, seconds=1.0), "What happens?"]),
        "all": Talk([tone(0.5), clip(3, 3, 2.0), "then", picture(0), clip(4, grids=1), "?"]),
        "video with its sound": Talk([talkie(1, tone(1.6), 2, 1.0), "What happens?"]),
        "sound longer than its video": Talk(["See", talkie(6, tone(4.6), 2, 1.0), "And?"]),
    },
}
HANDED_ON = {
    "qwen2_5_omni": {"hidden_states", "token_embeds", "position_ids"},
    "qwen3_omni": {"hidden_states", "speech_rows", "position_ids", "token_ids"},
}


@dataclass(frozen=True)
class Thinker:
    name: str
    folder: str
    reference: ThinkerReference

    @cache  # noqa: B019 - two families, with which every engine is compared
    def answers(self) -> dict[str, ThinkerAnswer]:
        return {n: self.reference.answer(t, NUM_TOKENS) for n, t in TALKS[self.name].items()}

    @property
    def greedy(self) -> SamplingParams:
        suppressed = self.reference.suppressed
        return SamplingParams(
            temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, suppress_token_ids=suppressed
        )


@pytest.fixture(scope="module")
def thinker(seeded: Callable[[str], str]) -> Callable[[str], Thinker]:
    return cache(lambda name: Thinker(name, seeded(name), ThinkerReference(seeded(name))))


def build(folder: str | Path, **settings: Any) -> LLMEngine:
    return LLMEngine(EngineConfig(model=str(folder), part="thinker", **settings))


def assert_equal(output: RequestOutput, expected: ThinkerAnswer, handed_on: set[str]) -> None:
    assert output.error is None
    assert list(output.prompt_token_ids) == expected.prompt_ids
    completion = output.outputs[0]
    assert completion.tensors.keys() == handed_on
    pairs = zip(completion.token_ids, expected.token_ids, strict=True)
    for place, (ours, theirs) in enumerate(pairs):
        if ours != theirs:
            assert expected.margins[place] < NEAR_TIE, f"token {place}"
            return
    rows = dict(completion.tensors)
    ids = [*output.prompt_token_ids, *completion.token_ids][:-1]
    assert rows.pop("token_ids", torch.tensor(ids)).tolist() == ids
    for name, found in rows.items():
        expect = getattr(expected, name).to(found.dtype)
        # Looked-up and counted values are equal, computed ones are close.
        near = 1e-4 if name in ("hidden_states", "speech_rows") else 0
        torch.testing.assert_close(found, expect, atol=near, rtol=0)


@pytest.mark.shows("parity", "hidden states", "prefix hits", "images", "audio")
@pytest.mark.parametrize(
    ("name", "block_size", "budget", "num_seqs"),
    [
        *(("qwen2_5_omni", *limits) for limits in ((4, 8, 4), (16, 512, 2), (4, 64, 1))),
        *(("qwen3_omni", *limits) for limits in ((4, 8, 4), (16, 512, 4))),
    ],
)
def test_mixed_requests_equal_transformers_cold_and_warm(
    name: str, block_size: int, budget: int, num_seqs: int, thinker: Callable[[str], Thinker]
) -> None:
    case = thinker(name)
    engine = build(
        case.folder,
        block_size=block_size,
        num_blocks=4096 // block_size,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
    )
    for temperature in ("cold", "warm"):
        outputs = engine.generate([talk.prompt for talk in TALKS[name].values()], case.greedy)
        for output, expected in zip(outputs, case.answers().values(), strict=True):
            assert_equal(output, expected, HANDED_ON[name])
            if temperature == "warm":
                last = len(expected.prompt_ids) - 1
                assert output.num_cached_tokens == last // block_size * block_size
    stats = engine.stats().kv
    assert stats is not None and stats.items is not None and stats.items.held == 0
    engine.check_integrity()


def test_answers_depend_on_everything_that_is_shown(thinker: Callable[[str], Thinker]) -> None:
    """Guards parity against being vacuous; positions of videos exceed indices, images' do not."""
    case = thinker("qwen2_5_omni")
    shown: list[Any] = [picture(0), picture(1), tone(1.0), tone(1.0, 2000.0), clip(1), clip(2)]
    answers = [tuple(case.reference.answer(Talk([x, "What?"]), 8).token_ids) for x in shown]
    assert len(set(answers)) == len(shown)
    assert all(len(set(answer)) > 3 for answer in answers)
    places = case.answers()["video that runs ahead"].position_ids
    assert int(places.max()) > len(places) - 1
    placed = case.answers()["two images in a row"].position_ids
    assert int(placed.max()) < len(placed) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_naming_of_weights_loads(
    dtype: torch.dtype, tmp_path: Path, seeded: Callable[[str], str]
) -> None:
    """Also names like those of the modules in newer transformers."""
    renamed = tmp_path / "omni"
    shutil.copytree(seeded("qwen2_5_omni"), renamed)
    weights = load_file(renamed / "model.safetensors")
    newer = {
        name.replace("thinker.model.", "thinker.model.language_model.")
        .replace("thinker.audio_tower.", "thinker.model.audio_tower.")
        .replace("thinker.visual.", "thinker.model.visual."): tensor
        for name, tensor in weights.items()
    }
    assert newer.keys() != weights.keys()
    save_file(newer, renamed / "model.safetensors", metadata={"format": "pt"})
    settings = ModelSettings(dtype, torch.device("cpu"), block_size=4, max_model_len=64)
    old, new = (
        load_model(open_checkpoint(folder, part="thinker"), settings).state_dict()
        for folder in (seeded("qwen2_5_omni"), renamed)
    )
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    assert any("audio_bos_eos" in name for name in old)


def test_towers_give_rows_in_the_models_type(seeded: Callable[[str], str]) -> None:
    engine = build(seeded("qwen2_5_omni"), dtype="bfloat16", max_model_len=256, num_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    (output,) = engine.generate(TALKS["qwen2_5_omni"]["all"].prompt, params)
    assert output.error is None
    tensors = output.outputs[0].tensors
    assert tensors["token_embeds"].dtype == tensors["hidden_states"].dtype == torch.bfloat16
    assert tensors["position_ids"].dtype == torch.int64


def test_only_the_thinkers_weights_are_loaded(seeded: Callable[[str], str]) -> None:
    engine = build(seeded("qwen2_5_omni"), max_model_len=64, num_blocks=16)
    part = open_checkpoint(seeded("qwen2_5_omni"), part="thinker")
    stored = sum(tensor.nbytes for _, tensor in part.weights())
    assert stored <= engine.memory_plan.weights_bytes < 1.1 * stored


def test_features_of_several_depths_matter(
    thinker: Callable[[str], Thinker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise parity would not show that they are added, and where."""
    case = thinker("qwen3_omni")
    engine = build(case.folder, num_blocks=64)
    merge = ModelInputBuilder._merge_items

    def merge_alone(*given: Any) -> None:
        merge(*given)

    monkeypatch.setattr(ModelInputBuilder, "_merge_items", merge_alone)
    (output,) = engine.generate([TALKS["qwen3_omni"]["image"].prompt], case.greedy)
    rows = output.outputs[0].tensors["hidden_states"]
    expected = case.answers()["image"].hidden_states[: len(rows)]
    assert (rows - expected).abs().max() > 1e-2


def test_a_thinker_without_a_talker_has_no_outputs_for_it(tmp_path: Path) -> None:
    engine = build(build_qwen3_omni(tmp_path / "quiet", speaks=False), num_blocks=64)
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    (output,) = engine.generate([BOTH["text"].prompt], greedy)
    assert output.outputs[0].tensors.keys() == {"hidden_states"}
