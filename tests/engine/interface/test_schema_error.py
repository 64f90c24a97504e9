"""Mistakes in settings, of files and of Python: one short message each, in plain words."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

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
    "a wrong item is not also too few items": (
        {"axles": [{"wheels": [{"size": "a"}]}]},
        "axles[0].wheels[0].size: should be a valid integer, got 'a'",
    ),
    "nor in a mapping": (
        {"by_name": {"front": {"wheels": [{"size": "a"}]}}},
        "by_name.front.wheels[0].size: should be a valid integer, got 'a'",
    ),
    "an empty list inside a list is told itself": (
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
def test_a_mistake_is_told_once_in_plain_words(mistake: str) -> None:
    data, expected = MISTAKES[mistake]
    assert explain(data, as_json=True) == expected


def test_python_values_are_spoken_of_alike() -> None:
    assert explain({"name": 5}, as_json=False) == "name: should be text, got 5"
    assert explain({"seats": 5}, as_json=False) == "seats: should be a list, got 5"
    assert explain({"by_name": 5}, as_json=False) == "by_name: should be a mapping, got 5"


@pytest.mark.parametrize("length", [78, 79])
def test_only_a_value_longer_than_80_characters_is_shortened(length: int) -> None:
    told = explain({"seats": "x" * length}, as_json=True).partition("got ")[2]
    assert told == ("'" + "x" * 78 + "'" if length == 78 else "'" + "x" * 76 + "...")


class Trailer(BaseModel):
    size: int
    trailer: Trailer | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in data.items() if value is not None}


@pytest.mark.parametrize("given", [{}, {"size": None}])
def test_what_is_missing_is_named_once_be_it_absent_or_dropped(given: dict[str, Any]) -> None:
    for data, place in ((given, "size"), ({"size": 1, "trailer": given}, "trailer.size")):
        with pytest.raises(ValidationError) as caught:
            Trailer.model_validate(data)
        told = explain_validation_error(caught.value, Trailer, data)
        assert told == f"{place}: missing; it must be given"


def test_of_many_mistakes_the_first_are_told() -> None:
    with pytest.raises(ValidationError) as caught:
        Wheel.model_validate(data := {f"key {number}": 1 for number in range(9_000)})
    told = explain_validation_error(caught.value, Wheel, data).splitlines()
    assert len(told) == 11 and told[-1] == "and 8990 more"
    assert "unknown key" in told[0]


class Inner(Settings):
    """Inside of others."""

    size: int = 1


class Outer(Settings):
    """Has one that must be given, after one that need not."""

    inner: Inner = Inner()
    name: str


make: Any = Outer  # in ways that a type checker would find


def test_every_mistake_is_a_line_with_the_class_and_the_place() -> None:
    with pytest.raises(ValueError) as caught:
        make(nmae="x", inner={"siez": 3, "size": "much"})
    assert not isinstance(caught.value, ValidationError)
    assert str(caught.value).splitlines() == [
        "Outer: inner.size: should be a valid integer, got 'much'",
        "Outer: inner.siez: unknown key; did you mean 'size'?",
        "Outer: name: missing; it must be given",
        "Outer: nmae: unknown key; did you mean 'name'?",
    ]


def test_fields_go_by_name() -> None:
    with pytest.raises(ValueError, match="Outer takes its fields by name, such as name=.*, got 3"):
        make(3)


def test_settings_are_not_changed() -> None:
    settings = Outer(name="x")
    with pytest.raises(ValueError, match=r"Outer: name cannot be changed.*model_copy\(update="):
        settings.name = "y"
    assert settings.model_copy(update={"name": "y"}).name == "y"


@pytest.mark.parametrize("strict", [False, True])
def test_a_reader_of_a_file_is_told_the_whole_place(strict: bool) -> None:
    """The settings inside do not tell their own mistakes then."""
    data: dict[str, Any] = {"name": "x", "inner": {"size": "much"}}
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate_json(json.dumps(data), strict=strict)
    (finding,) = caught.value.errors()
    assert finding["loc"] == ("inner", "size")
    with pytest.raises(ValidationError):
        TypeAdapter(Outer).validate_python(data)


def test_the_cause_shows_no_text_of_the_library() -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert caught.value.__cause__ is None and caught.value.__context__ is None
