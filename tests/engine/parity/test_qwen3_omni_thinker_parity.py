"""Qwen3-Omni's thinker through the whole engine, against transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams
from omni.seeded.qwen3_omni import build_qwen3_omni
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
# A place is 1/13 s: seconds of grids are whole numbers of them, as with published settings.
TALKS = {
    "text": Talk(["The harbour wakes."]),
    "image": Talk([picture(0), "What is it?"]),
    "audio": Talk([tone(1.0), "Who speaks?"]),
    "audio of more than one piece": Talk([tone(2.13, 440.0), "Who speaks?"]),
    "audio of one row": Talk([tone(0.03), "Who?"]),
    "image and audio": Talk(["See", picture(1), "and hear", tone(0.4), "."]),
    "two images in a row": Talk([picture(0), picture(2), "Which?"]),
    "video": Talk([clip(1, seconds=1.0), "What happens?"]),
    "all": Talk([tone(0.5), clip(3, 3, 2.0), "then", picture(0), clip(4, grids=1), "?"]),
    "video with its sound": Talk([talkie(1, tone(1.6), 2, 1.0), "What happens?"]),
    "video longer than its sound": Talk([talkie(5, tone(0.9), 6, 1.0), "What happens?"]),
    "sound longer than its video": Talk(["See", talkie(6, tone(4.6), 2, 1.0), "And?"]),
    "turns": Talk([picture(0), "What is it?"], ("A harbour.", "Are you sure?")),
}


@pytest.fixture(scope="module")
def reference(seeded: Callable[[str], str]) -> ThinkerReference:
    return ThinkerReference(seeded("qwen3_omni"))


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
    for place, ours in enumerate(completion.token_ids):
        if ours != expected.token_ids[place]:
            assert expected.margins[place] < NEAR_TIE, f"token {place}"
            return
    handed_on = dict(completion.tensors)
    ids = [*output.prompt_token_ids, *completion.token_ids][:-1]
    assert handed_on.pop("token_ids").tolist() == ids
    for name, rows in handed_on.items():
        theirs = getattr(expected, name)
        torch.testing.assert_close(rows, theirs.to(rows.dtype), atol=1e-4, rtol=0)
    assert torch.equal(completion.tensors["position_ids"], expected.position_ids.long())


@pytest.mark.parametrize(("block_size", "budget", "num_seqs"), [(4, 8, 4), (16, 512, 4)])
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
            model=seeded("qwen3_omni"),
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
            assert output.outputs[0].tensors.keys() == {
                "hidden_states",
                "position_ids",
                "speech_rows",
                "token_ids",
            }
            assert_equal(output, expected)
            if temperature == "warm":
                last = len(expected.prompt_ids) - 1
                assert output.num_cached_tokens == last // block_size * block_size
    engine.check_integrity()


def test_features_of_several_depths_matter(
    seeded: Callable[[str], str],
    answers: dict[str, ThinkerAnswer],
    greedy: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else parity would not show that they are added, and where."""
    engine = LLMEngine(EngineConfig(model=seeded("qwen3_omni"), part="thinker", num_blocks=64))
    monkeypatch.setattr(engine._runner._inputs.__class__, "_item_features", lambda *_: None)
    (output,) = engine.generate([TALKS["image"].prompt], greedy)
    rows = output.outputs[0].tensors["hidden_states"]
    expected = answers["image"].hidden_states[: len(rows)]
    assert (rows - expected).abs().max() > 1e-2


def test_a_thinker_without_a_talker_hands_on_nothing_for_it(
    tmp_path: Path, answers: dict[str, ThinkerAnswer], greedy: SamplingParams
) -> None:
    folder = build_qwen3_omni(tmp_path / "quiet", speaks=False)
    engine = LLMEngine(EngineConfig(model=str(folder), part="thinker", num_blocks=64))
    (output,) = engine.generate([TALKS["text"].prompt], greedy)
    assert output.outputs[0].tensors.keys() == {"hidden_states"}
