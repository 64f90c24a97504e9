"""The training of the shipped checkpoint: its parts for a step or two, and what they share."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig

from engine.requests.encoder_input import StreamedRows
from training.spoken_sums.answers import Utterance
from training.spoken_sums.bigvgan import (
    BigVGANBudget,
    make_bigvgan,
    quicken,
    sound_of,
    train_bigvgan,
)
from training.spoken_sums.codes import FRAMES_PER_CODE, Codebook, learn_codebook
from training.spoken_sums.ctc import CTCSettings, train_ctc
from training.spoken_sums.dit import DiTBudget, Voice, flow_of, make_dit, train_dit
from training.spoken_sums.end_to_end import (
    EndToEndSettings,
    TalkShares,
    draw_spoken,
    train_end_to_end,
)
from training.spoken_sums.lanes import needed_programs, run_lanes
from training.spoken_sums.mel import HOP, MEL_MAX, MEL_MIN, NUM_BANDS, mel_of
from training.spoken_sums.module_training import ModuleTraining
from training.spoken_sums.mouth_sizes import BIGVGAN, DIT, NUM_CODES, TALKER
from training.spoken_sums.polish import PolishSettings, polish
from training.spoken_sums.question_texts import question_texts
from training.spoken_sums.questions import Question, load_questions, noises, write_questions
from training.spoken_sums.rendering import Renderer
from training.spoken_sums.rooms import recorded
from training.spoken_sums.sizes import omni_config
from training.spoken_sums.speech import Speech
from training.spoken_sums.sums import NOT_A_SUM, is_held_out
from training.spoken_sums.talker import Renditions, Reply, codes_said, make_talker, rows_beside
from training.spoken_sums.tokenizer import build_tokenizer
from training.spoken_sums.training_run import TrainingRun
from training.spoken_sums.typed import TypedSettings, train_typed
from training.spoken_sums.understanding import right_reply, written
from training.spoken_sums.work_folder import claim
from training.spoken_sums.workers import Workers


def questions(count: int) -> list[Question]:
    """Return texts used in training, with noise as sound, a second of each."""
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


def test_conversations_by_voice_and_keyboard_follow_the_rule() -> None:
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


PART = """
import pathlib, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / name).touch()
if name == "rests":
    sys.stdin.read()
if name == "fails":
    while not (folder / "rests").exists():
        time.sleep(0.01)
    sys.exit(3)
"""


def test_parts_of_a_lane_follow_each_other(tmp_path: Path) -> None:
    run_lanes((("one", "two"), ("three",)), [sys.executable, "-c", PART, str(tmp_path)])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["one", "three", "two"]


def test_a_part_that_fails_ends_those_that_run_in_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The idle process reads a pipe that nobody closes: only killing it ends it.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as open_pipe:
        begin = subprocess.Popen

        def popen(command: list[str]) -> subprocess.Popen[bytes]:
            return begin(command, stdin=open_pipe.stdout)

        monkeypatch.setattr(subprocess, "Popen", popen)
        lanes = (("rests", "after"), ("fails", "never"))
        with pytest.raises(subprocess.CalledProcessError, match="exit status 3") as caught:
            run_lanes(lanes, [sys.executable, "-c", PART, str(tmp_path)])
        open_pipe.terminate()
    assert caught.value.cmd[-1] == "fails"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["fails", "rests"]


def test_missing_programs_are_reported_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="espeak-ng and flite not found"):
        needed_programs()


def test_a_folder_is_taken_up_by_the_plan_that_made_it_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "work"
    claim(folder, {"typed": 3, "ctc": 2})
    claim(folder, {"typed": 3, "ctc": 2})
    assert json.loads((folder / "plan.json").read_text()) == {"typed": 3, "ctc": 2}
    with pytest.raises(ValueError, match=r"another plan: typed 3 \(wanted: 620\)\. Choose"):
        claim(folder, {"typed": 620, "ctc": 2})


def test_spectrograms_are_as_the_vocoder_reads_them():
    samples = torch.randn(2, 4800, generator=torch.Generator().manual_seed(0)) * 0.1
    mel = mel_of(samples)

    assert mel.shape == (2, 4800 // prod(BIGVGAN["upsample_rates"]), NUM_BANDS)
    assert prod(BIGVGAN["upsample_rates"]) == HOP
    assert (BIGVGAN["mel_dim"], DIT["mel_dim"]) == (NUM_BANDS, NUM_BANDS)
    assert DIT["repeats"] == FRAMES_PER_CODE
    # BigVGAN clips decibels: values it clips must not differ in its training input.
    network = make_bigvgan(torch.Generator().manual_seed(0))
    ends = network.process_mel_spectrogram(torch.tensor([MEL_MIN, MEL_MAX]))
    assert ends[0] > -1 and ends[1] == pytest.approx(1, abs=0.01)
    assert mel.min() >= MEL_MIN and mel.max() <= MEL_MAX


def test_a_louder_sound_has_larger_values_and_silence_the_least():
    tone = torch.sin(torch.arange(4800) * 0.1)
    quiet, loud = mel_of(tone * 0.01), mel_of(tone * 0.1)

    assert (loud >= quiet).all() and loud.max() > quiet.max() + 0.5
    assert (mel_of(torch.zeros(4800)) == mel_of(torch.zeros(4800)).min()).all()


def test_code_0_is_unused_and_every_code_fits_talker_and_flow(tmp_path):
    generator = torch.Generator().manual_seed(0)
    mels = [torch.randn(500, NUM_BANDS, generator=generator) for _ in range(6)]

    codebook = learn_codebook(mels, tmp_path / "codebook.pt")
    codes = codebook.encode(mels[0])

    assert len(codebook.patches) == NUM_CODES - 1
    assert codes.shape == (250,) and codes.min() >= 1 and codes.max() < NUM_CODES
    assert TALKER["tts_codec_pad_token_id"] == NUM_CODES < TALKER["vocab_size"]
    assert TALKER["vocab_size"] <= DIT["num_embeds"] + 1
    assert torch.equal(learn_codebook([], tmp_path / "codebook.pt").patches, codebook.patches)


def test_codes_stand_for_the_nearest_frames():
    patches = torch.randn(NUM_CODES - 1, 160, generator=torch.Generator().manual_seed(0))
    codebook = Codebook(patches)
    codes = torch.tensor([1, 700, NUM_CODES - 1, 7])

    mel = codebook.decode(codes) + 0.01

    assert mel.shape == (8, NUM_BANDS)
    assert codebook.encode(mel).tolist() == codes.tolist()


def test_the_quick_snake_is_the_anti_aliased_one_and_has_its_gradient():
    config = Qwen2_5OmniBigVGANConfig(**BIGVGAN | {"upsample_initial_channel": 64})
    network = make_bigvgan(torch.Generator().manual_seed(0), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(("alpha", "beta")):
                parameter.normal_(0, 0.5, generator=generator)
    mel = torch.randn(2, 16, NUM_BANDS, generator=generator)

    def run():
        network.zero_grad()
        samples = sound_of(network, mel)
        samples.square().sum().backward()
        return samples, {name: part.grad.clone() for name, part in network.named_parameters()}

    samples, gradients = run()
    with torch.no_grad():
        engine_sees = network(mel.transpose(1, 2))
    torch.testing.assert_close(engine_sees, samples.clamp(-1, 1).detach(), rtol=0, atol=1e-6)

    quicken(network)
    quick_samples, quick_gradients = run()

    torch.testing.assert_close(quick_samples, samples, rtol=0, atol=1e-5)
    for name, gradient in gradients.items():
        largest = gradient.abs().max()
        torch.testing.assert_close(quick_gradients[name], gradient, rtol=0, atol=1e-4 * largest)


@pytest.mark.parametrize("is_free", [False, True])
def test_the_flow_in_training_is_the_one_of_transformers(is_free):
    network = make_dit(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.05, generator=generator)
    voices = [
        Voice(torch.randn(1, 16, generator=generator), torch.randn(1, 40, 80, generator=generator))
        for _ in range(2)
    ]
    frames = torch.randn(2, 48, 80, generator=generator)
    codes = torch.randint(1, NUM_CODES, (2, 24), generator=generator)
    time = torch.rand(2, generator=generator)

    with torch.no_grad():
        expected = network(
            hidden_states=frames,
            condition_vector=torch.cat([voice.reference_mel for voice in voices]),
            speaker_embedding=torch.cat([voice.conditioning for voice in voices])[:, None].expand(
                -1, 48, -1
            ),
            quantized_code=codes,
            time_step=time,
            drop_audio_conditioning=is_free,
            drop_code=is_free,
            apply_cfg=False,
        )
        rows = torch.tensor([-1, -1] if is_free else [0, 1])
        made = flow_of(network, frames, time, codes * (not is_free), voices, rows)

    assert expected.std() > 0.1
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


WIDTH = 256


def _reply(generator):
    def rows(count):
        return torch.randn(count, WIDTH, generator=generator)

    reply = Reply("three", rows(5), rows(3), rows(3))
    voices = {"slt": rows(1)[0], "rms": rows(1)[0]}
    return reply, Renditions({}, voices, rows(1)[0], rows(1)[0], torch.zeros(1, 1))


def _network():
    return make_talker(omni_config(build_tokenizer()).talker_config, 0)


def test_rows_are_where_a_speech_prompt_has_them():
    network = _network()
    reply, renditions = _reply(torch.Generator().manual_seed(0))
    codes = torch.tensor([3, 9, 27, 81, 5, 6])

    made = rows_beside(network, reply, renditions, "rms", codes)

    # As engine/models/qwen2_5_omni/speakers.py: start, reply, end, then pad for ever.
    start = torch.cat([reply.prompt_rows, renditions.voice_rows["rms"][None], reply.reply_rows])
    streamed = StreamedRows(start, num_replaced=5)
    streamed.extend(renditions.end_row[None])
    streamed.complete(renditions.pad_row)
    mask, pad, bos = (TALKER[f"tts_codec_{name}_token_id"] for name in ("mask", "pad", "start"))
    with torch.no_grad():
        expected = network.model.embed_tokens(torch.tensor([*[mask] * 5, pad, bos, *codes]))
    streamed.apply(expected, 0)
    torch.testing.assert_close(made, expected, rtol=0, atol=0)


def test_what_is_said_step_by_step_is_what_the_whole_sequence_predicts():
    network = _network()
    reply, renditions = _reply(torch.Generator().manual_seed(1))

    said = codes_said(network, reply, renditions, "slt", most=12)

    with torch.no_grad():
        rows = rows_beside(network, reply, renditions, "slt", said)
        hidden = network.thinker_to_talker_proj(rows[None])
        output = network.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
        logits = network.codec_head(output[0])
        logits[:, network.codec_bos_token] = -torch.inf
    predicted = logits.argmax(-1)[len(reply.prompt_rows) + 1 :][: len(said)]
    assert len(said) > 0
    assert predicted.tolist() == said.tolist()


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.2 / 4), (3, 0.2 * 0.97), (50, 0.2 * 0.5), (99, 0.2 * 0.02)],
    ids=["the first", "the last of the warm-up", "half of them", "the last"],
)
def test_a_step_follows_the_clipped_gradient_at_its_own_rate(
    tmp_path: Path, step: int, rate: float
) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=123.0)
    run = TrainingRun(tmp_path / "state.pt", 100, weight=nn.ParameterList([weight]))
    run.num_steps = step
    weight.grad = torch.tensor([30.0, -40.0])
    run.update(optimizer, [weight], Workers(), 0.2, warmup=4)
    torch.testing.assert_close(weight.detach(), rate * torch.tensor([-0.6, 0.8]))


@pytest.mark.parametrize("steps", [0, 3])
def test_a_run_makes_its_steps_and_no_more_when_it_is_called_again(
    tmp_path: Path, steps: int
) -> None:
    module = nn.Linear(2, 1)
    run = TrainingRun(tmp_path / "run.pt", steps, module=module)
    assert list(run.steps()) == [pytest.approx(number / 3) for number in range(steps)]
    again = TrainingRun(tmp_path / "run.pt", steps, module=module)
    assert again.num_steps == steps
    assert list(again.steps()) == []
