"""Each part of the training for a step or two, on made-up sounds: what it reads, keeps and leaves.

Nothing is spoken here, so that neither espeak-ng nor flite is needed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from training.spoken_sums.answers import Utterance
from training.spoken_sums.bigvgan import BigVGANBudget, make_bigvgan, train_bigvgan
from training.spoken_sums.codes import Codebook
from training.spoken_sums.ctc import CTCSettings, train_ctc
from training.spoken_sums.dit import DiTBudget, train_dit
from training.spoken_sums.end_to_end import (
    EndToEndSettings,
    TalkShares,
    draw_spoken,
    train_end_to_end,
)
from training.spoken_sums.mel import mel_of
from training.spoken_sums.module_training import ModuleTraining
from training.spoken_sums.mouth_sizes import NUM_CODES
from training.spoken_sums.polish import PolishSettings, polish
from training.spoken_sums.question_texts import question_texts
from training.spoken_sums.questions import Question, load_questions, noises, write_questions
from training.spoken_sums.rendering import Renderer
from training.spoken_sums.rooms import recorded
from training.spoken_sums.speech import Speech
from training.spoken_sums.sums import NOT_A_SUM, is_held_out
from training.spoken_sums.tokenizer import build_tokenizer
from training.spoken_sums.typed import TypedSettings, train_typed
from training.spoken_sums.understanding import right_reply, written


def questions(count: int) -> list[Question]:
    """Texts that are asked in training, with noise for sound, a second of each."""
    generator = torch.Generator().manual_seed(0)
    return [
        Question(words, torch.randn(80, 100, generator=generator))
        for words in question_texts(count, seed=3)
    ]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(build_tokenizer())


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_questions_are_read_as_they_were_written(tmp_path: Path) -> None:
    asked = questions(5)
    write_questions(tmp_path / "questions-000.safetensors", asked)
    read = load_questions(tmp_path)
    assert [each.words for each in read] == [each.words for each in asked]
    assert all(
        torch.equal(ours.powers.half(), theirs.powers)
        for ours, theirs in zip(asked, read, strict=True)
    )


def test_the_thinker_s_parts_follow_each_other_and_the_last_leaves_the_tower_alone(
    tmp_path: Path, renderer: Renderer
) -> None:
    (tmp_path / "questions").mkdir()
    write_questions(tmp_path / "questions" / "questions-000.safetensors", questions(12))
    train_typed(tmp_path, renderer, TypedSettings(steps=2, tokens=300))
    train_ctc(tmp_path, renderer, CTCSettings(steps=1, batch=4))
    train_end_to_end(tmp_path, renderer, EndToEndSettings(steps=1, spoken=2, tokens=300))
    polish(tmp_path, renderer, PolishSettings(steps=1, recordings=6, tokens=300))

    typed, heard = load(tmp_path / "typed.pt"), load(tmp_path / "ctc.pt")
    before, after = (load(tmp_path / f"{name}.pt")["model"] for name in ("end_to_end", "thinker"))
    assert typed["num_steps"] == 2
    embeddings = "model.language_model.embed_tokens.weight"
    assert torch.equal(typed["decoder"]["embed_tokens.weight"], after[embeddings])
    tower = {name for name in after if "audio_tower" in name}
    assert {f"model.audio_tower.{name}" for name in heard["tower"]} == tower
    assert all(torch.equal(before[name], after[name]) for name in tower)
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def test_conversations_by_voice_and_keyboard_say_what_the_rule_says() -> None:
    """A typed question after a spoken one goes on from its result, as by voice."""
    draw, asked = random.Random(5), questions(300)
    shares = TalkShares(turns=(0, 1, 1), typed=0.5)
    typed_follow_ups = out_of_range = 0
    for _ in range(600):
        talk, last = draw_spoken(asked, draw, shares), None
        assert not talk.turns or talk.questions[0] is not None
        for turn, question in zip(talk.turns, talk.questions, strict=True):
            reply, result = right_reply(turn.words, last)
            assert turn.reply == reply
            one = written(reply)
            assert one is None or not is_held_out(one)
            goes_on = turn.words.removeprefix("and ").split()[0] in ("plus", "minus", "times")
            typed_follow_ups += question is None and goes_on and last is not None
            out_of_range += one is not None and result is None
            last = result
    assert typed_follow_ups > 50
    assert out_of_range > 10


def test_noise_is_heard_as_no_sum() -> None:
    made = noises(4, random.Random(1))
    assert {right_reply(each.words) for each in made} == {(NOT_A_SUM, None)}
    for each in made:
        assert 50 <= each.powers.shape[1] <= 400
        assert bool(recorded(each.powers).features.isfinite().all())


def speech(voice: str, seed: int) -> Speech:
    samples = 0.1 * torch.randn(70 * 480, generator=torch.Generator().manual_seed(seed))
    return Speech(Utterance("one hundred twenty seven", voice), samples, mel_of(samples))


def test_the_vocoder_s_parts_make_their_steps_and_go_on_from_them(tmp_path: Path) -> None:
    speeches = [speech("slt", 0), speech("rms", 1)]
    patches = torch.randn(NUM_CODES - 1, 160, generator=torch.Generator().manual_seed(0))
    waveforms = tmp_path / "bigvgan.pt"
    train_bigvgan(speeches, BigVGANBudget(1, batch=1), waveforms)
    train_bigvgan(speeches, BigVGANBudget(2, batch=1, anti_aliased=True), waveforms)
    train_dit(speeches, Codebook(patches), DiTBudget(1, batch=1), tmp_path / "dit.pt")
    assert load(waveforms)["step"] == 2
    assert load(tmp_path / "dit.pt")["step"] == 1
    assert set(load(waveforms)["module"]) == set(make_bigvgan(torch.Generator()).state_dict())


def test_a_module_s_training_goes_on_where_it_ended(tmp_path: Path) -> None:
    seen: list[int] = []

    def train(steps: int) -> nn.Module:
        torch.manual_seed(0)
        module = nn.Linear(2, 1)
        training = ModuleTraining(module, tmp_path / "module.pt", steps, rate=0.1)

        def loss_of(step: int) -> tuple[torch.Tensor, dict[str, float]]:
            seen.append(step)
            return module(torch.ones(1, 2)).square().sum(), {}

        training.run(loss_of)
        return module

    half = train(2)
    whole = train(5)
    assert seen == [0, 1, 2, 3, 4]
    assert not torch.equal(half.weight, whole.weight)
    assert torch.equal(train(5).weight, whole.weight)
