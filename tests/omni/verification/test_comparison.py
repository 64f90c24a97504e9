"""Comparison distinguishes rounding from a difference, and a near tie from a wrong token."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import FinishReason, SamplingParams, TokenLogprobs, Waveform
from omni.verification.verify import Comparison, Spread, Tolerance, compare_outputs
from stages import Completion, StageOutput

GREEDY = SamplingParams(temperature=0.0, logprobs=2)


def output(token_ids: tuple[int, ...] = (), gap: float = 1.0, **fields: Any) -> StageOutput:
    """Return two prompt tokens; at every generated position token 8 or 9 follows by ``gap``."""
    logprobs = tuple(
        TokenLogprobs(token, -0.5, ((token, -0.5), (8 if token == 9 else 9, -0.5 - gap)))
        for token in token_ids
    )
    defaults: dict[str, Any] = {
        "text": "t",
        "finish_reason": FinishReason.LENGTH,
        "num_prompt_tokens": 2,
        "logprobs": logprobs,
    }
    return StageOutput("r", "s", finished=True, token_ids=token_ids, **(defaults | fields))


def compare(uncached: StageOutput, cached: StageOutput, **options: Any) -> Comparison:
    defaults: dict[str, Any] = {
        "sampling": GREEDY,
        "dtype": torch.float32,
        "tolerance": Tolerance(),
    }
    return compare_outputs(uncached, cached, "warm", **(defaults | options))


def tensors(value: Tensor) -> StageOutput:
    return output(tensors={"hidden_states": value})


def test_an_output_equals_itself() -> None:
    same = output((8, 9), tensors={"hidden_states": torch.rand(3, 4), "ids": torch.arange(3)})
    found = compare(same, same)
    assert (found.differences, found.near_tie) == ([], None)
    assert found.spread == Spread({"hidden_states": 0.0, "ids": 0.0}, 0.0)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"token_ids": (8, 7)}, "tokens", "generated token 1 is 7, without caching 9"),
        ({"token_ids": (8,)}, "tokens", "generated token 1 is not there, without caching 9"),
        ({"text": "other"}, "tokens", "text is 'other', without caching 't'"),
        (
            {"completions": (Completion("t", (8, 9), None), Completion("x", (1,), None))},
            "tokens",
            "further completions",
        ),
        ({"finish_reason": FinishReason.STOP}, "finish_reason", "is stop, without caching length"),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], kind: str, message: str) -> None:
    uncached = output((8, 9))
    (difference,) = compare(uncached, replace(uncached, **changes)).differences
    assert (difference.request_id, difference.stage, difference.run) == ("r", "s", "warm")
    assert difference.kind == kind
    assert message in difference.message


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2), (torch.int64, 0.0)],
)
def test_tensors_may_differ_by_rounding_only(dtype: torch.dtype, allowed: float) -> None:
    assert Tolerance().tensor("hidden_states", dtype) == allowed
    ours = torch.zeros(3, 4, dtype=dtype)
    for difference, equal in ((0.9 * allowed, True), (allowed + 1, False)):
        theirs = (ours.double() + difference).to(dtype)
        assert (compare(tensors(ours), tensors(theirs)).differences == []) == equal


def test_a_row_of_large_elements_may_differ_in_proportion_and_other_rows_not() -> None:
    ours = torch.tensor([[100.0, 0.0], [0.5, 0.0]])
    nudge = torch.tensor([[0.0, 5e-4], [0.0, 0.0]])
    assert compare(tensors(ours), tensors(ours + nudge)).differences == []
    assert compare(tensors(ours), tensors(ours + nudge.flip(0))).differences


def test_the_worst_row_is_named() -> None:
    ours = torch.zeros(5, 3)
    theirs = ours.clone()
    theirs[1, 0], theirs[3, 2] = 0.5, -2.0
    found = compare(tensors(ours), tensors(theirs))
    assert found.spread.tensors == {"hidden_states": 2.0}
    assert "differs in 2 of 5 rows, most in row 3: by 2" in found.differences[0].message


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (torch.zeros(2, 4), r"is \(2, 4\) torch.float32, without caching \(3, 4\)"),
        (torch.zeros(3, 4, dtype=torch.float64), "torch.float64, without caching"),
        (torch.full((3, 4), torch.nan), "differs in 3 of 3 rows"),
        (torch.full((3, 4), torch.inf), "differs in 3 of 3 rows"),
    ],
)
def test_shape_type_and_numbers_that_are_none_count(theirs: Tensor, message: str) -> None:
    (difference,) = compare(tensors(torch.zeros(3, 4)), tensors(theirs)).differences
    assert difference.kind == "tensor"
    assert re.search(message, difference.message)


def test_equal_infinities_and_nans_are_equal() -> None:
    odd = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0]])
    assert compare(tensors(odd), tensors(odd.clone())).differences == []


def test_a_tensor_that_only_one_run_has_is_named() -> None:
    with_tensor, without = tensors(torch.zeros(1, 1)), output()
    assert "there only without caching" in compare(with_tensor, without).differences[0].message
    assert "there only in the warm run" in compare(without, with_tensor).differences[0].message


def test_one_dimensional_and_empty_tensors_are_compared() -> None:
    ours = torch.zeros(3)
    theirs = torch.tensor([0.0, 0.0, 1.0])
    assert "element 2" in compare(tensors(ours), tensors(theirs)).differences[0].message
    empty = torch.zeros(0, 4)
    assert compare(tensors(empty), tensors(empty)).differences == []


def test_waveforms_may_differ_by_a_step_of_their_samples_and_no_more() -> None:
    ours = output(audio=Waveform(torch.zeros(4), 24_000))
    step = 1 / 32_768
    for louder, equal in ((1e-6, True), (0.99 * step, True), (1.01 * step, False)):
        found = compare(ours, output(audio=Waveform(torch.full((4,), louder), 24_000)))
        assert (found.differences == []) == equal
        assert found.spread.tensors["waveform"] == pytest.approx(louder)
    assert "'waveform' differs in 4 of 4 elements" in found.differences[0].message


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (None, "waveform is there only without caching"),
        (
            Waveform(torch.zeros(3), 24_000),
            "'waveform' is (3,) torch.float32, without caching (4,)",
        ),
        (Waveform(torch.zeros(4), 16_000), "waveform has 16000 samples per second"),
    ],
)
def test_a_waveform_of_another_length_or_rate_is_named(
    theirs: Waveform | None, message: str
) -> None:
    (difference,) = compare(
        output(audio=Waveform(torch.zeros(4), 24_000)), output(audio=theirs)
    ).differences
    assert difference.kind == "tensor"
    assert message in difference.message


def test_atol_replaces_the_tolerance() -> None:
    ours, theirs = torch.zeros(2, 2), torch.full((2, 2), 0.1)
    assert compare(tensors(ours), tensors(theirs), tolerance=Tolerance(0.2)).differences == []
    exact = Tolerance(0.0, Spread({"hidden_states": 1.0}))
    assert compare(tensors(ours), tensors(ours + 1e-9), tolerance=exact).differences


def test_a_difference_is_measured_relative_to_its_row_and_the_worst_share_is_named() -> None:
    ours = torch.tensor([[200.0, 0.0], [0.5, 0.0]])
    nudge = torch.tensor([[0.0, 1.0], [0.0, 0.5]])
    found = compare(tensors(ours), tensors(ours + nudge))
    assert found.spread.tensors == {"hidden_states": 0.5}
    assert "2 of 2 rows, most in row 1: by 0.5, allowed are 1e-05" in found.differences[0].message


def test_four_times_the_noise_is_allowed_within_limits() -> None:
    for noise, allowed in ((0.0, 1e-5), (1e-6, 1e-5), (1e-4, 4e-4), (0.5, 4e-3)):
        tolerance = Tolerance(noise=Spread({"hidden_states": noise}))
        assert tolerance.tensor("hidden_states", torch.float32) == pytest.approx(allowed)
        assert tolerance.tensor("hidden_states", torch.int64) == 0.0
        assert tolerance.tensor("other", torch.float32) == 1e-5
    assert Tolerance(measuring=True).tensor("hidden_states", torch.float32) == 1e-3
    assert Tolerance(measuring=True).tensor("hidden_states", torch.int64) == 0.0


def test_a_measured_spread_of_logprobs_widens_what_is_a_tie() -> None:
    uncached, again = output((8, 8), gap=5e-4), output((8, 9), gap=5e-4)
    shifted = tuple(
        replace(entry, logprob=entry.logprob + shift)
        for entry, shift in zip(again.logprobs or (), (2e-4, 1.0), strict=True)
    )
    again = replace(again, logprobs=shifted)
    noise = compare(uncached, again, tolerance=Tolerance(measuring=True)).spread
    assert noise.logprobs == pytest.approx(2e-4), "of tokens before the runs part"
    assert compare(uncached, again).near_tie is None
    assert compare(uncached, again, tolerance=Tolerance(noise=noise)).near_tie is not None


def test_a_spread_covers_what_it_includes() -> None:
    spread = Spread({"a": 1.0, "b": 2.0}, 0.5)
    spread.include(Spread({"b": 1.0, "c": 3.0}, 0.6))
    assert spread == Spread({"a": 1.0, "b": 2.0, "c": 3.0}, 0.6)


def test_a_near_tie_of_a_greedy_choice_is_no_difference() -> None:
    """Rows up to the tie are still compared, and nothing after it."""
    rows = torch.rand(5, 2)
    uncached = output((8, 8, 3), gap=1e-6, tensors={"hidden_states": rows})
    behind = rows.clone()
    behind[3:] += 1
    cached = output((8, 9, 4), gap=1e-6, tensors={"hidden_states": behind}, text="other")
    found = compare(uncached, cached)
    assert found.differences == []
    assert found.near_tie is not None
    assert (found.near_tie.position, found.near_tie.token_ids) == (1, (8, 9))
    before = behind.clone()
    before[2] += 1
    cached = replace(cached, tensors={"hidden_states": before})
    assert "row 2" in compare(uncached, cached).differences[0].message


@pytest.mark.parametrize(
    ("uncached", "cached", "options"),
    [
        (output((8,), gap=1e-2), output((9,)), {}),
        (output((8,), gap=1e-6), output((7,)), {}),
        (output((8,), gap=1e-6, logprobs=None), output((9,)), {}),
        (output((8, 8), gap=1e-6), output((8,)), {}),
        (output((8,), gap=1e-6), output((9,)), {"sampling": SamplingParams(temperature=1.0)}),
        (
            output((8,), gap=1e-6),
            output((9,)),
            {"sampling": SamplingParams(temperature=0.0, repetition_penalty=1.1)},
        ),
        (
            output((8,), gap=1e-6),
            output((9,)),
            {"sampling": SamplingParams(temperature=0.0, logit_bias={8: 1.0})},
        ),
        (output((8,), gap=1e-6), output((9,)), {"sampling": None}),
    ],
    ids=[
        "far",
        "third token",
        "no logprobs",
        "shorter",
        "sampled",
        "penalty",
        "bias",
        "no sampling",
    ],
)
def test_a_token_that_no_tie_explains_is_a_difference(
    uncached: StageOutput, cached: StageOutput, options: dict[str, Any]
) -> None:
    found = compare(uncached, cached, **options)
    assert found.near_tie is None
    assert [difference.kind for difference in found.differences] == ["tokens"]


def test_ties_are_wider_in_half_precision() -> None:
    uncached, cached = output((8,), gap=5e-2), output((9,), gap=5e-2)
    assert compare(uncached, cached, dtype=torch.bfloat16).near_tie is not None
    assert compare(uncached, cached, dtype=torch.float32).near_tie is None
