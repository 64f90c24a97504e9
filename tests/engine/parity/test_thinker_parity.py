"""Qwen2.5-Omni's thinker through the whole engine, against transformers' own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams
from engine.models.base import ModelSettings
from engine.models.model_loader import load_model, open_checkpoint
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
NAMES = ("hidden_states", "token_embeds", "position_ids")
TALKS = {
    "text": Talk(["The harbour wakes."]),
    "image": Talk([picture(0), "What is it?"]),
    "audio": Talk([tone(1.0), "Who speaks?"]),
    "audio of more than one piece": Talk([tone(2.13, 440.0), "Who speaks?"]),
    "audio of one row": Talk([tone(0.03), "Who?"]),
    "image and audio": Talk(["See", picture(1), "and hear", tone(0.4), "."]),
    "audio and image": Talk([tone(0.41), picture(2), "?"]),
    "two images in a row": Talk([picture(0), picture(2), "Which?"]),
    "two sounds in a row": Talk([tone(0.3), tone(0.7, 200.0), "Which?"]),
    "video": Talk([clip(1), "What happens?"]),
    "video that runs ahead": Talk([clip(2, grids=3, seconds=0.87), "And?"]),
    "all": Talk([tone(0.5), clip(3), "then", picture(0), clip(4, grids=1), "?"]),
    "video with its sound": Talk([talkie(1, tone(0.6)), "What happens?"]),
    "video longer than its sound": Talk([talkie(5, tone(0.9), 6, 1.0), "What happens?"]),
    "sound longer than its video": Talk(["See", talkie(6, tone(4.6), 2), "And?"]),
    "video and sound of many chunks": Talk([talkie(7, tone(4.1), 3, 2.0), "And?"]),
    "grids that skip chunks": Talk([talkie(8, tone(1.5), 3, 5.0), "And?"]),
    "grids close together": Talk([talkie(9, tone(2.2), 8, 0.34), "And?"]),
    "video that runs beyond its last sound": Talk([talkie(3, tone(0.3), 3, 0.9), "And then?"]),
    "videos with sound among others": Talk(
        [tone(0.3), talkie(1, tone(0.7), 2), "then", picture(0), talkie(2, tone(2.5), 4, 1.0), "?"]
    ),
    "turns": Talk([picture(0), "What is it?"], ("A harbour.", "Are you sure?")),
}


@pytest.fixture(scope="module")
def reference(seeded: Callable[[str], str]) -> ThinkerReference:
    return ThinkerReference(seeded("qwen2_5_omni"))


@pytest.fixture(scope="module")
def answers(reference: ThinkerReference) -> dict[str, ThinkerAnswer]:
    return {name: reference.answer(talk, NUM_TOKENS) for name, talk in TALKS.items()}


@pytest.fixture(scope="module")
def greedy(reference: ThinkerReference) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        suppress_token_ids=reference.suppressed,
    )


def assert_equal(output: RequestOutput, expected: ThinkerAnswer) -> None:
    assert output.error is None
    assert list(output.prompt_token_ids) == expected.prompt_ids
    completion = output.outputs[0]
    pairs = zip(completion.token_ids, expected.token_ids, strict=True)
    for place, (ours, theirs) in enumerate(pairs):
        if ours != theirs:
            assert expected.margins[place] < NEAR_TIE, f"token {place}"
            return
    assert completion.tensors.keys() == set(NAMES)
    for name, rows in completion.tensors.items():
        torch.testing.assert_close(rows, getattr(expected, name), atol=1e-4, rtol=0)
    # These are looked up and counted, not computed.
    assert torch.equal(completion.tensors["token_embeds"], expected.token_embeds)
    assert torch.equal(completion.tensors["position_ids"], expected.position_ids)


@pytest.mark.parametrize(
    ("block_size", "budget", "num_seqs"),
    [(4, 512, 4), (16, 512, 4), (4, 8, 4), (16, 8, 2), (4, 64, 1)],
)
def test_mixed_requests_equal_transformers_cold_and_warm(
    block_size: int,
    budget: int,
    num_seqs: int,
    seeded: Callable[[str], str],
    answers: dict[str, ThinkerAnswer],
    greedy: SamplingParams,
) -> None:
    engine = LLMEngine(
        EngineConfig(
            model=seeded("qwen2_5_omni"),
            part="thinker",
            block_size=block_size,
            num_blocks=4096 // block_size,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
        )
    )
    prompts = [talk.prompt for talk in TALKS.values()]
    for temperature in ("cold", "warm"):
        outputs = engine.generate(prompts, greedy)
        for output, expected in zip(outputs, answers.values(), strict=True):
            assert_equal(output, expected)
            if temperature == "warm":
                last = len(expected.prompt_ids) - 1
                assert output.num_cached_tokens == last // block_size * block_size
    stats = engine.stats().kv
    assert stats is not None and stats.items is not None and stats.items.held == 0
    engine.check_integrity()


def test_answers_depend_on_everything_that_is_shown(reference: ThinkerReference) -> None:
    """Else parity would show little."""
    shown: list[Any] = [picture(0), picture(1), tone(1.0), tone(1.0, 2000.0), clip(1), clip(2)]
    answers = [tuple(reference.answer(Talk([item, "What?"]), 8).token_ids) for item in shown]
    assert len(set(answers)) == len(shown)
    assert all(len(set(answer)) > 3 for answer in answers)


def test_videos_do_run_ahead_of_indices(answers: dict[str, ThinkerAnswer]) -> None:
    places = answers["video that runs ahead"].position_ids
    assert int(places.max()) > len(places) - 1
    placed = answers["two images in a row"].position_ids
    assert int(placed.max()) < len(placed) - 1


@pytest.fixture(scope="module")
def renamed(seeded: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with its weights named as the modules are in newer transformers."""
    folder = tmp_path_factory.mktemp("renamed") / "omni"
    shutil.copytree(seeded("qwen2_5_omni"), folder)
    weights = load_file(folder / "model.safetensors")
    newer = {
        name.replace("thinker.model.", "thinker.model.language_model.")
        .replace("thinker.audio_tower.", "thinker.model.audio_tower.")
        .replace("thinker.visual.", "thinker.model.visual."): tensor
        for name, tensor in weights.items()
    }
    assert newer.keys() != weights.keys()
    save_file(newer, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_naming_of_weights_loads(
    dtype: torch.dtype, renamed: Path, seeded: Callable[[str], str]
) -> None:
    published, newer = (
        load_model(
            open_checkpoint(folder, part="thinker"),
            ModelSettings(dtype, torch.device("cpu"), block_size=4, max_model_len=64),
        ).state_dict()
        for folder in (seeded("qwen2_5_omni"), renamed)
    )
    assert published.keys() == newer.keys()
    assert all(torch.equal(published[name], newer[name]) for name in published)
    assert any("audio_bos_eos" in name for name in published)


def test_towers_give_rows_in_the_models_type(seeded: Callable[[str], str]) -> None:
    engine = LLMEngine(
        EngineConfig(
            model=seeded("qwen2_5_omni"),
            part="thinker",
            dtype="bfloat16",
            max_model_len=256,
            num_blocks=64,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=1)
    (output,) = engine.generate(TALKS["all"].prompt, params)
    assert output.error is None
    tensors = output.outputs[0].tensors
    assert tensors["token_embeds"].dtype == tensors["hidden_states"].dtype == torch.bfloat16
    assert tensors["position_ids"].dtype == torch.int64


def test_only_the_thinkers_weights_are_loaded(seeded: Callable[[str], str]) -> None:
    folder = seeded("qwen2_5_omni")
    engine = LLMEngine(EngineConfig(model=folder, part="thinker", max_model_len=64, num_blocks=16))
    part = open_checkpoint(folder, part="thinker")
    stored = sum(tensor.nbytes for _, tensor in part.weights())
    assert stored <= engine.memory_plan.weights_bytes < 1.1 * stored
