"""The C kernel of anti-aliased snakes gives what transformers' module gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniSnakeBeta,
)

from engine import GenerationParams
from engine.models.base import CodeChunk
from engine.models.model_loader import load_generator, open_checkpoint
from engine.models.qwen2_5_omni.code2wav import NativeSnake, use_native_snakes
from engine.native import load_kernels
from tests.support.native_kernels import needs_kernels


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
    """A tile has 512 samples: what a filter sees of its neighbours, and beyond the ends, counts."""
    theirs, samples = snake(shape[1]), normal(*shape)
    made = NativeSnake(theirs, load_kernels())(samples)
    torch.testing.assert_close(made, theirs(samples), atol=1e-5, rtol=1e-5)


@needs_kernels
@pytest.mark.parametrize("size", [1e-4, 30.0, 1e5])
def test_small_and_large_samples_are_as_near_to_exact_as_torch_is(size: float) -> None:
    """Of large arguments a sine is decided by rounding: measured against float64."""
    theirs, samples = snake(4), size * normal(1, 4, 700)
    made, by_torch = NativeSnake(theirs, load_kernels())(samples), theirs(samples)
    exact = theirs.double()(samples.double())
    assert (made - exact).abs().max() <= 4 * (by_torch - exact).abs().max()


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    """An engine fails such a request: it must not come out as a number."""
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
def test_samples_and_parameters_of_wrong_shapes_are_told() -> None:
    kernels, taps, two = load_kernels(), torch.zeros(12), torch.zeros(2)
    with pytest.raises(ValueError, match=r"up is \(11,\), expected \(12,\)"):
        kernels.snake(normal(1, 2, 8), taps[1:].contiguous(), taps, two, two)
    with pytest.raises(ValueError, match=r"scales is \(1,\), expected \(2,\)"):
        kernels.snake(normal(1, 2, 8), taps, taps, two, two[:1])
    with pytest.raises(ValueError, match="samples must be contiguous float32 on a CPU"):
        kernels.snake(normal(1, 2, 8).double(), taps, taps, two, two)


def test_without_kernels_the_vocoder_says_the_same(
    seeded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``OMNI_NATIVE=0``, or no compiler: transformers' own modules, and nearly the same sound."""
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
