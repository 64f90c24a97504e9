"""Settings made in Python tell their mistakes as a YAML file's are told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from engine.interface.settings import Settings


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
