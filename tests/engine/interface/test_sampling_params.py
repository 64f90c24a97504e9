"""Every limit of ``SamplingParams`` is an error that names the field."""

from __future__ import annotations

import pytest

from engine import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ["a", ""]),
        ("stop", ""),
        ("stop_token_ids", [-1]),
        ("suppress_token_ids", [-1]),
        ("logprobs", -1),
        ("n", 0),
        ("max_token", 3),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_field(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_min_tokens_beyond_max_tokens_is_an_error_with_both_numbers():
    with pytest.raises(ValueError, match=r"min_tokens \(5\).*max_tokens \(4\)"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="end").stop == ("end",)


def test_params_cannot_change_under_a_running_request():
    params = SamplingParams()
    with pytest.raises(ValueError, match="temperature cannot be changed"):
        params.temperature = 0.0  # type: ignore[misc]


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-6, False), (1.0, False)])
def test_only_temperature_zero_is_greedy(temperature: float, greedy: bool):
    assert SamplingParams(temperature=temperature).is_greedy is greedy
