"""The vocoder against transformers, in batches and by kernels; voices are read as data."""

from __future__ import annotations

import os
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    DiTAttention,
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniDiTRotaryEmbedding,
    Qwen2_5OmniSnakeBeta,
)

from engine import GenerationParams
from engine.models.base import CodeChunk
from engine.models.model_loader import load_generator, open_checkpoint
from engine.models.qwen2_5_omni.code2wav import (
    Code2Wav,
    NativeSnake,
    initial_noise,
    neighbour_attention,
    use_native_snakes,
)
from engine.models.qwen2_5_omni.speakers import SPEAKERS_FILE, Speaker, find_speaker, load_speakers
from engine.native import load_kernels
from tests.support.native_kernels import needs_kernels
from tests.support.vocoder_reference import VocoderReference, random_codes

ROOT = Path(__file__).resolve().parents[3]
BLOCK = 4
# The seeded vocoder's samples have a deviation of 0.01; 0.01 % of that is rounding.
ATOL = 1e-6
FAST = GenerationParams(num_steps=3)
Speakers: TypeAlias = dict[str, Speaker]


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
    """With equal rows at every position, scores depend on the distance alone."""
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
        make(vocoder, [codes], [speakers["Chelsie"]], FAST)[0], expected, atol=ATOL, rtol=0
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
    found = make(vocoder, [codes], [speakers["Ethan"]], asked)[0]
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)


def test_embeddings_of_codes_are_computed_once_per_pass(folder: str, speakers: Speakers) -> None:
    vocoder = open_vocoder(folder)
    made: list[str] = []
    for name in ("text_embed", "rotary_embed"):
        module = getattr(vocoder.dit, name).module
        module.register_forward_pre_hook(lambda *_, name=name: made.append(name))
    of_a_pass = ["text_embed", "text_embed", "rotary_embed"]  # codes, and their absence
    for codes in (random_codes(5), random_codes(5, seed=1), random_codes(9)):
        found = make(vocoder, [codes], [speakers["Chelsie"]], FAST)
        assert made == of_a_pass
        made.clear()
        assert torch.equal(found, make(open_vocoder(folder), [codes], [speakers["Chelsie"]], FAST))
    unguided = FAST.model_copy(update={"guidance_scale": 0.0})
    make(vocoder, [random_codes(5)], [speakers["Chelsie"]], unguided)
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
    vocoder.check_speaker(speakers["Chelsie"])
    strange = replace(speakers["Chelsie"], reference_mel=torch.zeros(1, 3, 79))
    with pytest.raises(ValueError, match=r"widths \(16, 79\); the model takes \(16, 80\)"):
        vocoder.check_speaker(strange)


def snake(channels: int, **settings: int) -> Qwen2_5OmniAntiAliasedActivation1d:
    made = Qwen2_5OmniAntiAliasedActivation1d(Qwen2_5OmniSnakeBeta(channels), **settings)
    generator = torch.Generator().manual_seed(channels)
    with torch.no_grad():
        made.act.alpha.normal_(generator=generator)
        made.act.beta.normal_(generator=generator)
    return made.requires_grad_(False)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1]))


@needs_kernels
@pytest.mark.parametrize(
    "shape", [(1, 3, 1), (1, 2, 2), (2, 3, 7), (3, 5, 511), (1, 4, 512), (2, 2, 513), (1, 6, 1500)]
)
def test_any_number_of_samples_gives_what_transformers_gives(shape: tuple[int, int, int]) -> None:
    """A tile has 512 samples; filters also read its neighbours, and padding beyond the ends."""
    theirs, samples = snake(shape[1]), normal(*shape)
    made = NativeSnake(theirs, load_kernels())(samples)
    torch.testing.assert_close(made, theirs(samples), atol=1e-5, rtol=1e-5)


@needs_kernels
@pytest.mark.parametrize("size", [1e-4, 30.0, 1e5])
def test_small_and_large_samples_are_as_near_to_exact_as_torch_is(size: float) -> None:
    """The sine of a large argument depends on its rounding, hence a comparison with float64."""
    theirs, samples = snake(4), size * normal(1, 4, 700)
    made, by_torch = NativeSnake(theirs, load_kernels())(samples), theirs(samples)
    exact = theirs.double()(samples.double())
    assert (made - exact).abs().max() <= 4 * (by_torch - exact).abs().max()


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_so(value: float) -> None:
    """An engine fails such a request, so NaN and infinity must not become finite."""
    samples = normal(1, 2, 600)
    samples[0, 0, 300] = value
    made = NativeSnake(snake(2), load_kernels())(samples)
    assert not made[0, 0].isfinite().all()
    assert made[0, 1].isfinite().all()


@needs_kernels
def test_snakes_of_another_kind_and_of_another_precision_stay_as_they_are() -> None:
    network = nn.ModuleDict(
        {
            "usual": snake(2),
            "longer": snake(2, up_kernel_size=16, down_kernel_size=16),
            "in_16_bits": snake(2).bfloat16(),
            "other": Qwen2_5OmniAntiAliasedActivation1d(nn.SiLU()),
        }
    )
    use_native_snakes(network)
    replaced = [name for name, module in network.items() if isinstance(module, NativeSnake)]
    assert replaced == ["usual"]


@needs_kernels
def test_samples_and_parameters_of_wrong_shapes_are_refused() -> None:
    kernels, taps, two = load_kernels(), torch.zeros(12), torch.zeros(2)
    with pytest.raises(ValueError, match=r"up is \(11,\), expected \(12,\)"):
        kernels.snake(normal(1, 2, 8), taps[1:].contiguous(), taps, two, two)
    with pytest.raises(ValueError, match=r"scales is \(1,\), expected \(2,\)"):
        kernels.snake(normal(1, 2, 8), taps, taps, two, two[:1])
    with pytest.raises(ValueError, match="samples must be contiguous float32 on a CPU"):
        kernels.snake(normal(1, 2, 8).double(), taps, taps, two, two)


def test_without_kernels_the_vocoder_gives_the_same_sound(
    seeded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``OMNI_NATIVE=0``, or no compiler: transformers' modules give nearly the same sound."""
    said = []
    for native in ("0", "1"):
        monkeypatch.setenv("OMNI_NATIVE", native)
        model = load_generator(
            open_checkpoint(seeded("qwen2_5_omni"), part="code2wav", revision=None),
            torch.device("cpu"),
        )
        chunk = CodeChunk(torch.arange(1, 13), 0, model.choose_speaker(None), None)
        said.append(model.generate([chunk], GenerationParams(num_steps=2))[0])
    torch.testing.assert_close(said[0], said[1], atol=1e-6, rtol=1e-5)


@given(
    length=st.integers(1, 23),
    block_size=st.integers(1, 6),
    backward=st.integers(0, 1),
    ahead=st.integers(0, 1),
    batch=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_it_equals_masked_attention(length, block_size, backward, ahead, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, 2, length, 8, generator=generator) for _ in range(3))
    block = torch.arange(length) // block_size
    distance = block[None, :] - block[:, None]
    seen = (distance >= -backward) & (distance <= ahead)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    found, weights = neighbour_attention(
        _module(block_size),
        query,
        key,
        value,
        torch.tensor([backward == 1, True, ahead == 1]),
        is_causal=False,
    )
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=1e-5, rtol=0)
    assert weights is None


@pytest.mark.parametrize("sees", [(False, True, False), (True, True, False), (True, True, True)])
def test_of_many_blocks_each_is_scored_with_its_neighbours_alone(
    monkeypatch: pytest.MonkeyPatch, sees: tuple[bool, ...]
):
    block_size, scores = 4, F.scaled_dot_product_attention
    asked: list[tuple[int, int]] = []

    def note(query: torch.Tensor, key: torch.Tensor, *others, **named):
        asked.append((query.shape[2], key.shape[2]))
        return scores(query, key, *others, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    rows = torch.randn(1, 2, 40 * block_size - 1, 8)
    neighbour_attention(_module(block_size), rows, rows, rows, torch.tensor(sees))
    assert asked == [(block_size, sum(sees) * block_size)]


def _module(block_size: int) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(block_size=block_size))


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "bos_token": 7,
        "cond": torch.ones(1, 4, dtype=torch.bfloat16),
        "ref_mel": torch.zeros(1, 5, 3),
    } | changes


def save(folder: Path, content: Any) -> Path:
    torch.save(content, folder / SPEAKERS_FILE)
    return folder


def test_the_seeded_checkpoint_has_voices(seeded: Callable[[str], str]) -> None:
    speakers = load_speakers(Path(seeded("qwen2_5_omni")))
    assert tuple(speakers) == ("Chelsie", "Ethan")
    chelsie, ethan = speakers.values()
    assert find_speaker(speakers, None) is find_speaker(speakers, "Chelsie") is chelsie
    assert ethan.name == "Ethan" and ethan.bos_token != chelsie.bos_token
    assert ethan.conditioning.shape == (1, 16) and ethan.reference_mel.shape == (1, 40, 80)


@pytest.mark.parametrize(
    ("names", "default"), [(("Zoe", "Chelsie"), "Chelsie"), (("Zoe", "Ada"), "Zoe")]
)
def test_the_default_is_chelsie_or_the_first(
    tmp_path: Path, names: tuple[str, ...], default: str
) -> None:
    speakers = load_speakers(save(tmp_path, {name: entry() for name in names}))
    assert tuple(speakers) == names
    assert find_speaker(speakers, None).name == default


def test_numbers_are_float32_whatever_the_file_has(tmp_path: Path) -> None:
    speaker = load_speakers(save(tmp_path, {"A": entry()}) / SPEAKERS_FILE)["A"]
    assert speaker.conditioning.dtype == speaker.reference_mel.dtype == torch.float32


@pytest.fixture
def two_speakers(tmp_path: Path) -> Speakers:
    return load_speakers(save(tmp_path, {"Chelsie": entry(), "Ethan": entry()}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Ethen", r"'Ethen' \(did you mean 'Ethan'\?\); this checkpoint has Chelsie, Ethan"),
        ("Quux", "'Quux'; this checkpoint has Chelsie, Ethan"),
        (["Ethan"], "by name, got list"),
    ],
)
def test_the_error_for_an_unknown_speaker_lists_the_known_ones(
    two_speakers: Speakers, name: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find_speaker(two_speakers, name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "must map names to speakers"),
        ([entry()], "must map names to speakers, it holds a list"),
        ({"A": 3}, "'A' .* must have a name and bos_token, cond, ref_mel"),
        ({3: entry()}, "speaker 3 .* must have a name"),
        ({"A": {"bos_token": 7}}, "must have a name and bos_token, cond, ref_mel"),
        ({"A": entry(bos_token="7")}, "bos_token must be a token id, got '7'"),
        ({"A": entry(bos_token=-1)}, "bos_token must be a token id, got -1"),
        ({"A": entry(cond=torch.ones(4))}, r"cond must be a tensor of 2 dimensions.*got \(4,\)"),
        ({"A": entry(cond=[1.0])}, "cond must be a tensor.*got list"),
        ({"A": entry(ref_mel=torch.ones(2, 5, 3))}, r"ref_mel must be .*got \(2, 5, 3\)"),
        ({"A": entry(ref_mel=torch.ones(1, 0, 3))}, "ref_mel must hold finite numbers"),
        ({"A": entry(cond=torch.full((1, 4), torch.nan))}, "cond must hold finite numbers"),
        ({"A": entry(bos_token=True)}, "bos_token must be a token id, got True"),
        ({"A": entry(cond=torch.ones(1, 4).int())}, "cond must hold plain floating-point"),
        ({"A": entry(cond=torch.ones(1, 4).to_sparse())}, "cond must hold plain floating-point"),
        ({"A": entry(cond=torch.ones(1, 4, device="meta"))}, "cond must hold plain floating-point"),
        (
            {"A": entry(cond=torch.ones(1, 1).expand(1, 10**12))},
            r"cond has the shape \(1, 1000000000000\), but not as many numbers",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_speakers(save(tmp_path, content))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    with pytest.raises(ValueError, match="cannot be read as a dictionary of speakers"):
        load_speakers(save(tmp_path, {"A": entry(cond=Bomb())}))
    assert not (tmp_path / "exploded").exists()


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = save(tmp_path, {"A": entry()}) / SPEAKERS_FILE
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match="cannot be read as .*: it is compressed"):
        load_speakers(tmp_path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    save(tmp_path, {"A": entry()})
    os.truncate(tmp_path / SPEAKERS_FILE, 2**36)
    with pytest.raises(ValueError, match="it has 68719476736 bytes"):
        load_speakers(tmp_path)


def test_voices_stay_when_their_file_changes(tmp_path: Path) -> None:
    speaker = load_speakers(save(tmp_path, {"A": entry()}))["A"]
    os.truncate(tmp_path / SPEAKERS_FILE, 0)
    assert speaker.reference_mel.sum() == 0 and speaker.conditioning.sum() == 4


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SPEAKERS_FILE).write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as a dictionary of speakers"):
        load_speakers(tmp_path)


def test_a_checkpoint_without_voices_cannot_speak(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="spk_dict.pt is missing: .* it cannot speak"):
        load_speakers(tmp_path)
