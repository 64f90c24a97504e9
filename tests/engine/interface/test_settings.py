"""Errors of settings and ``SamplingParams``: one short message each that names the field."""

from __future__ import annotations

import copy
import json
import math
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from engine import SamplingParams
from engine.interface.settings import Settings, explain_validation_error


class Wheel(BaseModel):
    model_config = ConfigDict(extra="forbid")
    unknown_key_hints: ClassVar[dict[str, str]] = {"tyre": "tyres are the shop's"}

    kind: Literal["wheel"] = "wheel"
    size: int = 1


class Sail(BaseModel):
    kind: Literal["sail"]


class Axle(BaseModel):
    wheels: tuple[Wheel, ...] = Field(default=(), min_length=1)


class Car(BaseModel):
    axles: tuple[Axle, ...] = Field(default=(), min_length=1)
    by_name: dict[str, Axle] = Field(default={}, min_length=1)
    name: str = Field(default="car", min_length=1)
    plate: str = Field(default="plate", min_length=3)
    seats: tuple[int, ...] = Field(default=(1, 2), min_length=2)
    drive: Annotated[Wheel | Sail, Field(discriminator="kind")] | None = None


def explain(data: dict[str, Any], *, as_json: bool) -> str:
    with pytest.raises(ValidationError) as caught:
        if as_json:
            Car.model_validate_json(json.dumps(data), strict=True)
        else:
            Car.model_validate(data, strict=True)
    return explain_validation_error(caught.value, Car, data)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a wrong item is not also reported as too few items": (
        {"axles": [{"wheels": [{"size": "a"}]}]},
        "axles[0].wheels[0].size: should be a valid integer, got 'a'",
    ),
    "a wrong item in a mapping": (
        {"by_name": {"front": {"wheels": [{"size": "a"}]}}},
        "by_name.front.wheels[0].size: should be a valid integer, got 'a'",
    ),
    "an empty list inside a list": (
        {"axles": [{"wheels": []}]},
        "axles[0].wheels: must not be empty; at least 1 item is needed",
    ),
    "an empty mapping": ({"by_name": {}}, "by_name: must not be empty; at least 1 item is needed"),
    "an empty text": ({"name": ""}, "name: must not be empty; at least 1 character is needed"),
    "an empty text of three characters": (
        {"plate": ""},
        "plate: must not be empty; at least 3 characters are needed",
    ),
    "a short text": ({"plate": "a"}, "plate: should have at least 3 characters, got 'a'"),
    "a short list": ({"seats": [1]}, "seats: should have at least 2 items, got [1]"),
    "a number as text": ({"name": 5}, "name: should be text, got 5"),
    "text as a list": ({"seats": "two"}, "seats: should be a list, got 'two'"),
    "text as a mapping": ({"by_name": "two"}, "by_name: should be a mapping, got 'two'"),
    "a key that has a hint": (
        {"drive": {"kind": "wheel", "tyre": 1}},
        "drive.tyre: unknown key; tyres are the shop's",
    ),
    "a key without one": (
        {"drive": {"kind": "wheel", "siz": 1}},
        "drive.siz: unknown key; did you mean 'size'?",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_once_in_plain_words(mistake: str) -> None:
    data, expected = MISTAKES[mistake]
    assert explain(data, as_json=True) == expected


def test_python_values_get_the_same_messages() -> None:
    assert explain({"name": 5}, as_json=False) == "name: should be text, got 5"
    assert explain({"seats": 5}, as_json=False) == "seats: should be a list, got 5"
    assert explain({"by_name": 5}, as_json=False) == "by_name: should be a mapping, got 5"


@pytest.mark.parametrize("length", [78, 79])
def test_only_a_value_longer_than_80_characters_is_shortened(length: int) -> None:
    shown = explain({"seats": "x" * length}, as_json=True).partition("got ")[2]
    assert shown == ("'" + "x" * 78 + "'" if length == 78 else "'" + "x" * 76 + "...")


class Trailer(BaseModel):
    size: int
    trailer: Trailer | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in data.items() if value is not None}


@pytest.mark.parametrize("given", [{}, {"size": None}])
def test_a_missing_key_is_reported_once_if_absent_or_dropped(given: dict[str, Any]) -> None:
    for data, place in ((given, "size"), ({"size": 1, "trailer": given}, "trailer.size")):
        with pytest.raises(ValidationError) as caught:
            Trailer.model_validate(data)
        message = explain_validation_error(caught.value, Trailer, data)
        assert message == f"{place}: missing; it must be given"


def test_the_first_of_many_mistakes_are_reported() -> None:
    with pytest.raises(ValidationError) as caught:
        Wheel.model_validate(data := {f"key {number}": 1 for number in range(9_000)})
    lines = explain_validation_error(caught.value, Wheel, data).splitlines()
    assert len(lines) == 11 and lines[-1] == "and 8990 more"
    assert "unknown key" in lines[0]


class Inner(Settings):
    """Settings nested in others."""

    size: int = 1


class Outer(Settings):
    """Settings with a required field after an optional one."""

    inner: Inner = Inner()
    name: str


make: Any = Outer  # untyped, for calls that a type checker would reject


def test_every_mistake_is_a_line_with_the_class_and_the_path() -> None:
    with pytest.raises(ValueError) as caught:
        make(nmae="x", inner={"siez": 3, "size": "much"})
    assert not isinstance(caught.value, ValidationError)
    assert str(caught.value).splitlines() == [
        "Outer: inner.size: should be a valid integer, got 'much'",
        "Outer: inner.siez: unknown key; did you mean 'size'?",
        "Outer: name: missing; it must be given",
        "Outer: nmae: unknown key; did you mean 'name'?",
    ]


def test_positional_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="Outer takes its fields by name, such as name=.*, got 3"):
        make(3)


def test_settings_are_immutable() -> None:
    settings = Outer(name="x")
    with pytest.raises(ValueError, match=r"Outer: name cannot be changed.*model_copy\(update="):
        settings.name = "y"
    assert settings.model_copy(update={"name": "y"}).name == "y"


@pytest.mark.parametrize("strict", [False, True])
def test_nested_mistakes_of_a_file_have_the_whole_path(strict: bool) -> None:
    """The nested settings do not raise their own error."""
    data: dict[str, Any] = {"name": "x", "inner": {"size": "much"}}
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate_json(json.dumps(data), strict=strict)
    (finding,) = caught.value.errors()
    assert finding["loc"] == ("inner", "size")
    with pytest.raises(ValidationError):
        TypeAdapter(Outer).validate_python(data)


def test_the_error_of_pydantic_is_not_chained() -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert caught.value.__cause__ is None and caught.value.__context__ is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("min_tokens", -1),
        *(("temperature", value) for value in (-0.1, math.nan, math.inf)),
        ("top_k", -2),
        *(("top_p", value) for value in (0.0, 1.1, math.nan)),
        *(("min_p", value) for value in (-0.1, 1.1)),
        *(("repetition_penalty", value) for value in (0.0, math.inf)),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        *(("seed", value) for value in (-1, 2**63)),
        *(("stop", value) for value in (["a", ""], "")),
        ("stop_token_ids", [-1]),
        ("suppress_token_ids", [-1]),
        *(("logit_bias", {key: 1.0}) for key in (-1, "five", "-5", " 5", "\u0665", 1.5, True)),
        *(("logit_bias", {key: 1.0}) for key in ("9" * 5000, 10**5000)),
        *(("logit_bias", {5: bias}) for bias in (100.5, -101, math.nan, -math.inf, 10**400)),
        *(("logit_bias", {5: bias}) for bias in ("1", True, None)),
        *(("logit_bias", value) for value in ({5: 1.0, "5": 2.0}, [(5, 1.0)])),
        ("logprobs", -1),
        ("n", 0),
        ("max_token", 3),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_field(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="end").stop == ("end",)


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
def test_equal_biases_of_all_forms_are_equal(given: Any):
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == BIAS
    assert list(params.logit_bias) == [5, 50256] and len(params.logit_bias) == 2
    assert params == SamplingParams(logit_bias=BIAS) != SamplingParams(logit_bias={5: 1.5})
    assert hash(params) == hash(SamplingParams(logit_bias=BIAS))
    assert "logit_bias={5: 1.5, 50256: -100.0}" in repr(params)


def test_params_and_their_bias_are_immutable():
    given = dict(BIAS)
    params = SamplingParams(logit_bias=given)
    with pytest.raises(ValueError, match="temperature cannot be changed"):
        params.temperature = 0.0  # type: ignore[misc]
    given[5] = 0.0
    assert params.logit_bias[5] == 1.5
    with pytest.raises(TypeError, match="does not support item assignment"):
        params.logit_bias[5] = 0.0  # type: ignore[index]


def test_a_bias_is_serialized_as_a_mapping_and_copied():
    params = SamplingParams(logit_bias=BIAS)
    assert params.model_dump()["logit_bias"] == BIAS
    assert type(params.model_dump()["logit_bias"]) is dict
    assert params.model_dump(mode="json")["logit_bias"] == {"5": 1.5, "50256": -100.0}
    assert SamplingParams.model_validate(params.model_dump()) == params
    text = params.model_dump_json()
    assert SamplingParams.model_validate_json(text, strict=True) == params
    for each in (copy.copy(params), copy.deepcopy(params), params.model_copy(deep=True)):
        assert each == params and hash(each) == hash(params)


def test_only_the_first_wrong_bias_is_reported_with_its_token():
    message = r"^SamplingParams: logit_bias\.7: .* -100 to 100, got 101$"
    with pytest.raises(ValueError, match=message):
        SamplingParams(logit_bias={"6": 1.0, "7": 101, **dict.fromkeys(range(8, 99), 500)})
