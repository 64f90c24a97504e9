"""Every limit of ``SamplingParams`` is an error that names the field."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import numpy as np
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
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"five": 1.0}),
        ("logit_bias", {"-5": 1.0}),
        ("logit_bias", {" 5": 1.0}),
        ("logit_bias", {"\u0665": 1.0}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {"9" * 5000: 1.0}),
        ("logit_bias", {10**5000: 1.0}),
        ("logit_bias", {5: 1.0, "5": 2.0}),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: -101}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: float("-inf")}),
        ("logit_bias", {5: 10**400}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {5: True}),
        ("logit_bias", {5: None}),
        ("logit_bias", [(5, 1.0)]),
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


BIAS = {50256: -100.0, 5: 1.5}


@pytest.mark.parametrize(
    "given",
    [
        BIAS,
        {"50256": -100, "5": 1.5},
        {"50256": -100, 5: Fraction(3, 2)},
        {np.int64(50256): np.float32(-100), np.int32(5): np.float64(1.5)},
        SamplingParams(logit_bias=BIAS).logit_bias,
    ],
)
def test_a_bias_means_the_same_in_every_form(given: Any):
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == BIAS
    assert list(params.logit_bias) == [5, 50256] and len(params.logit_bias) == 2
    assert params == SamplingParams(logit_bias=BIAS) != SamplingParams(logit_bias={5: 1.5})
    assert hash(params) == hash(SamplingParams(logit_bias=BIAS))
    assert "logit_bias={5: 1.5, 50256: -100.0}" in repr(params)


def test_a_bias_cannot_change_under_a_running_request():
    given = dict(BIAS)
    params = SamplingParams(logit_bias=given)
    given[5] = 0.0
    assert params.logit_bias[5] == 1.5
    with pytest.raises(TypeError, match="does not support item assignment"):
        params.logit_bias[5] = 0.0  # type: ignore[index]


def test_a_bias_is_written_as_a_mapping_and_read_again():
    params = SamplingParams(logit_bias=BIAS)
    assert params.model_dump()["logit_bias"] == BIAS
    assert type(params.model_dump()["logit_bias"]) is dict
    assert params.model_dump(mode="json")["logit_bias"] == {"5": 1.5, "50256": -100.0}
    assert SamplingParams.model_validate(params.model_dump()) == params
    text = params.model_dump_json()
    assert SamplingParams.model_validate_json(text, strict=True) == params


def test_a_bias_survives_every_copy():
    params = SamplingParams(logit_bias=BIAS)
    for each in (copy.copy(params), copy.deepcopy(params), params.model_copy(deep=True)):
        assert each == params and hash(each) == hash(params)


def test_a_wrong_number_is_told_with_its_token_and_only_the_first():
    with pytest.raises(
        ValueError, match=r"^SamplingParams: logit_bias\.7: .* -100 to 100, got 101$"
    ):
        SamplingParams(logit_bias={"6": 1.0, "7": 101, **dict.fromkeys(range(8, 99), 500)})
