"""A deferred field is to readers what a plain one is, and is made once, when it is asked for."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest

from engine.interface.deferred import (
    Deferred,
    DeferredItems,
    as_stored,
    defer,
    deferrable,
    items_from,
    num_items,
    with_fields,
)


@deferrable("words", "numbers")
@dataclass(frozen=True)
class Told:
    name: str
    words: str = "none"
    numbers: tuple[int, ...] = ()


def test_what_is_deferred_is_made_once_and_only_when_asked_for() -> None:
    made = []

    def make() -> str:
        made.append(1)
        return "some words"

    told = Told("a", defer(Deferred(make)))
    other = with_fields(told, name="b")
    assert not made and isinstance(as_stored(other, "words"), Deferred)
    assert told.words == told.words == other.words == "some words"
    assert len(made) == 1, "what was made for one is there for all"
    assert as_stored(told, "words") == "some words"


def test_items_are_those_of_the_time_at_which_they_were_noted() -> None:
    source = [5, 9, 2]
    told = Told("a", numbers=defer(DeferredItems(source, 1, 3)))
    source += [7, 7]
    assert num_items(told, "numbers") == 2 and items_from(told, "numbers", 1) == (2,)
    assert isinstance(as_stored(told, "numbers"), DeferredItems), "neither made the whole"
    assert told.numbers == (9, 2) and isinstance(told.numbers, tuple)
    assert num_items(told, "numbers") == 2 and items_from(told, "numbers", 1) == (2,)


def test_to_all_others_the_object_is_a_plain_one() -> None:
    plain = Told("a", "x", (1, 2))
    told = Told("a", defer(Deferred(lambda: "x")), defer(DeferredItems([1, 2, 3], 0, 2)))
    for twin in (told, copy.copy(told), copy.deepcopy(told)):
        assert twin == plain and repr(twin) == repr(plain) and hash(twin) == hash(plain)
    assert replace(told, name="b") == Told("b", "x", (1, 2))
    assert Told("a") == Told("a", "none", ()) and [f.name for f in fields(told)][1] == "words"
    with pytest.raises(FrozenInstanceError):
        told.words = "y"  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"Told has no fields \['word'\]"):
        with_fields(told, word="y")
