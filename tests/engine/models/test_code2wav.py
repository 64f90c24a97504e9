"""The vocoder gives what transformers gives, in batches too, and encodes a voice once."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from torch import Tensor
from transformers import AttentionInterface
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    DiTAttention,
    Qwen2_5OmniDiTRotaryEmbedding,
)

from engine import GenerationParams
from engine.models.model_loader import load_generator, open_checkpoint
from engine.models.qwen2_5_omni.code2wav import Code2Wav, initial_noise
from engine.models.qwen2_5_omni.speakers import Speaker, Speakers, load_speakers
from tests.support.vocoder_reference import VocoderReference, random_codes

ROOT = Path(__file__).resolve().parents[3]
BLOCK = 4
# Samples of the seeded vocoder spread by 0.01; a hundredth of a percent of that is rounding.
ATOL = 1e-6
FAST = GenerationParams(num_steps=3)


@pytest.fixture(scope="module")
def folder(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_omni")


@pytest.fixture(scope="module")
def reference(folder: str) -> VocoderReference:
    return VocoderReference(folder)


@pytest.fixture(scope="module")
def speakers(folder: str) -> Speakers:
    return load_speakers(Path(folder))


def test_releases_of_transformers_that_turn_the_heads_wrongly_are_not_allowed() -> None:
    """huggingface/transformers#47328: from the first of version 5 to the last of 5.14."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = [Requirement(each) for each in project["dependencies"]]
    (allowed,) = [each.specifier for each in requirements if each.name == "transformers"]
    wrong = ["5.0.0", *(f"5.{minor}.{patch}" for minor in range(1, 15) for patch in range(4))]
    assert not list(allowed.filter(wrong))
    assert transformers.__version__ in allowed


def test_the_networks_heads_are_turned_by_how_far_apart_they_are(folder: str) -> None:
    """Alike at every place, queries and keys score by their distance alone."""
    config = open_checkpoint(folder, part="code2wav").config.dit_config
    seen: list[Tensor] = []

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Any:
        seen.append(query[0, 0] @ key[0, 0].T)
        return value.transpose(1, 2), None

    AttentionInterface.register("test_notes_scores", note)
    config._attn_implementation = "test_notes_scores"
    torch.manual_seed(0)
    attention, rotary = DiTAttention(config), Qwen2_5OmniDiTRotaryEmbedding(config)
    places = torch.arange(12)[None]
    rows = torch.randn(1, 1, config.hidden_size).expand(1, 12, -1)
    attention(rows, rotary(rows, places))
    scores = seen[0]
    assert scores.std() > 1e-3
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def open_vocoder(folder: str) -> Code2Wav:
    return Code2Wav(open_checkpoint(folder, part="code2wav"), torch.device("cpu"))


@pytest.fixture(scope="module")
def vocoder(folder: str) -> Code2Wav:
    return open_vocoder(folder)


def make(
    vocoder: Code2Wav, codes: list[tuple[int, ...]], voices: list[Speaker], params: GenerationParams
) -> Tensor:
    frames = len(codes[0]) * vocoder.frames_per_code
    noise = initial_noise(params.seed, 0, frames, vocoder.mel_dim)
    return vocoder(torch.tensor(codes), noise.expand(len(codes), -1, -1), voices, params)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 4 * BLOCK + 3])
def test_sound_is_that_of_transformers_at_every_border_of_blocks(
    vocoder: Code2Wav, reference: VocoderReference, speakers: Speakers, length: int
) -> None:
    codes = random_codes(length)
    expected = reference.waveform(codes, FAST)
    assert expected.std() > 1000 * ATOL
    torch.testing.assert_close(
        make(vocoder, [codes], [speakers.default], FAST)[0], expected, atol=ATOL, rtol=0
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"num_steps": 2, "seed": 7},
        {"num_steps": 3, "guidance_scale": 0.0},
        {"num_steps": 3, "guidance_scale": 2.0},
        {"num_steps": 4, "sway_coefficient": None},
        {"num_steps": 4, "sway_coefficient": 1.0},
    ],
)
def test_every_parameter_means_what_it_means_to_transformers(
    vocoder: Code2Wav, reference: VocoderReference, speakers: Speakers, params: dict[str, Any]
) -> None:
    asked, codes = GenerationParams(**params), random_codes(10)
    expected = reference.waveform(codes, asked, "Ethan")
    found = make(vocoder, [codes], [speakers.get("Ethan")], asked)[0]
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)


def test_a_batch_of_several_voices_gives_what_each_gives_alone(
    vocoder: Code2Wav, reference: VocoderReference, speakers: Speakers
) -> None:
    codes = [random_codes(11, seed) for seed in range(3)]
    names = ["Chelsie", "Ethan", "Chelsie"]
    batch = make(vocoder, codes, [speakers.get(name) for name in names], FAST)
    for row, each, name in zip(batch, codes, names, strict=True):
        torch.testing.assert_close(row, reference.waveform(each, FAST, name), atol=ATOL, rtol=0)


def test_sound_depends_on_codes_voice_and_seed(vocoder: Code2Wav, speakers: Speakers) -> None:
    codes, other_codes = random_codes(12), random_codes(12, seed=1)
    chelsie, ethan = speakers.get("Chelsie"), speakers.get("Ethan")
    sound = make(vocoder, [codes], [chelsie], FAST)
    assert torch.equal(sound, make(vocoder, [codes], [chelsie], FAST))
    for codes_, voice, seed in (
        (other_codes, chelsie, 0),
        (codes, ethan, 0),
        (codes, chelsie, 1),
    ):
        changed = make(vocoder, [codes_], [voice], FAST.model_copy(update={"seed": seed}))
        assert (changed - sound).abs().max() > 1000 * ATOL


def test_a_voice_is_encoded_once(folder: str, speakers: Speakers) -> None:
    vocoder = open_vocoder(folder)
    read: list[int] = []
    encoder = vocoder.dit.input_embed.spk_encoder.encoder
    encoder.register_forward_pre_hook(lambda _, arguments: read.append(len(arguments[0])))
    chelsie, ethan = speakers.get("Chelsie"), speakers.get("Ethan")
    for voices in ([chelsie], [chelsie, chelsie], [ethan, chelsie], [ethan]):
        make(vocoder, [random_codes(5)] * len(voices), voices, FAST)
    # Each with the silence that guidance sets against it.
    assert read == [2, 2]


def test_what_codes_alone_decide_is_made_once_in_a_pass_and_anew_in_the_next(
    folder: str, speakers: Speakers
) -> None:
    vocoder = open_vocoder(folder)
    made: list[str] = []
    for name in ("text_embed", "rotary_embed"):
        module = getattr(vocoder.dit, name).module
        module.register_forward_pre_hook(lambda *_, name=name: made.append(name))
    of_a_pass = ["text_embed", "text_embed", "rotary_embed"]  # codes, and their absence
    for codes in (random_codes(5), random_codes(5, seed=1), random_codes(9)):
        found = make(vocoder, [codes], [speakers.default], FAST)
        assert made == of_a_pass
        made.clear()
        assert torch.equal(found, make(open_vocoder(folder), [codes], [speakers.default], FAST))
    unguided = FAST.model_copy(update={"guidance_scale": 0.0})
    make(vocoder, [random_codes(5)], [speakers.default], unguided)
    assert made == ["text_embed", "rotary_embed"]


@pytest.mark.parametrize("seed", [0, 5])
def test_noise_is_that_of_transformers_and_the_same_in_every_window(seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = torch.randn([1, 60, 80])[0]
    assert torch.equal(initial_noise(seed, 0, 60, 80), whole)
    for start, stop in ((0, 1), (0, 24), (8, 24), (59, 60), (17, 43)):
        assert torch.equal(initial_noise(seed, start, stop, 80), whole[start:stop])


def test_a_part_of_another_kind_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="is a Qwen2_5OmniThinker.*supported is Qwen2_5OmniToken"):
        load_generator(open_checkpoint(folder, part="thinker"), torch.device("cpu"))


def test_upsampling_that_gives_codes_no_place_is_refused(folder: str) -> None:
    checkpoint = open_checkpoint(folder, part="code2wav")
    checkpoint.config.bigvgan_config.upsample_kernel_sizes = [21, 12, 8]
    with pytest.raises(ValueError, match="must differ by even numbers"):
        Code2Wav(checkpoint, torch.device("cpu"))


def test_a_voice_of_another_width_is_refused(vocoder: Code2Wav, speakers: Speakers) -> None:
    vocoder.check_speaker(speakers.default)
    strange = replace(speakers.default, reference_mel=torch.zeros(1, 3, 79))
    with pytest.raises(ValueError, match=r"widths \(16, 79\); the model takes \(16, 80\)"):
        vocoder.check_speaker(strange)
