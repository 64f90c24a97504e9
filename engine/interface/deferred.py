"""Fields of an output that are made when they are first asked for.

An output comes with every step, and most of what it could tell has been told before: all text so
far, all tokens so far. To copy that at every step would cost more the longer a request runs. Its
sources only ever grow at their end, so an output notes how much of them counts, and copies it only
for a caller who asks::

    source        | 5 | 9 | 2 | 7 | 7 | 3 | ... grows
    output 4      |<------------->|               makes (5, 9, 2, 7) when asked, whenever that is
    output 6      |<--------------------->|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar, cast

__all__ = [
    "Deferred",
    "DeferredItems",
    "as_stored",
    "defer",
    "deferrable",
    "items_from",
    "num_items",
    "with_fields",
]

T = TypeVar("T")


class Deferred(Generic[T]):
    """A value that is made once, when it is first asked for.

    Args:
        make: makes it; whenever it is called it has to make the same.
    """

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._value: T | None = None

    @property
    def value(self) -> T:
        """What it stands for."""
        make = self._make
        if make is not None:
            self._value = make()
            self._make = None
        return cast(T, self._value)


class DeferredItems(Deferred[tuple[T, ...]]):
    """The items ``[start, stop)`` of a list that only grows at its end, as a tuple."""

    __slots__ = ("_items", "_start", "_stop")

    def __init__(self, items: Sequence[T], start: int, stop: int) -> None:
        super().__init__(lambda: tuple(items[start:stop]))
        self._items, self._start, self._stop = items, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def since(self, first: int) -> tuple[T, ...]:
        """The items from the ``first`` on; no others are copied."""
        return tuple(self._items[self._start + first : self._stop])


def defer(deferred: Deferred[T]) -> T:
    """What a deferrable field takes in the place of a value."""
    return cast(T, deferred)


class _Field:
    """Gives a field's value, which it makes if that was deferred."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        stored = owner.__dict__[self._name]
        if isinstance(stored, Deferred):
            stored = owner.__dict__[self._name] = stored.value
        return stored

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__[self._name] = value


def deferrable(*names: str) -> Callable[[type[T]], type[T]]:
    """Let fields of a dataclass without slots take :class:`Deferred` values.

    To readers, to ``==``, to copies and to pickle the fields are what they would be otherwise.
    """

    def decorate(kind: type[T]) -> type[T]:
        for name in names:
            setattr(kind, name, _Field(name))

        def state(self: Any) -> dict[str, Any]:
            return {each.name: getattr(self, each.name) for each in fields(self)}

        kind.__getstate__ = state  # type: ignore[method-assign]
        return kind

    return decorate


def as_stored(output: object, name: str) -> Any:
    """A field as it was given, deferred or not: for an output made of another one."""
    return output.__dict__[name]


def with_fields(output: T, **changes: object) -> T:
    """A copy with other fields; unlike ``dataclasses.replace`` it leaves deferred what is.

    Raises:
        ValueError: there is no such field.
    """
    unknown = changes.keys() - type(cast(Any, output)).__dataclass_fields__.keys()
    if unknown:
        raise ValueError(f"{type(output).__name__} has no fields {sorted(unknown)}")
    copy = object.__new__(type(output))
    copy.__dict__.update(output.__dict__, **changes)
    return copy


def items_from(output: object, name: str, first: int) -> tuple[Any, ...]:
    """The items of a field from the ``first`` on, without making those before them."""
    stored = as_stored(output, name)
    items: tuple[Any, ...] = (
        stored.since(first) if isinstance(stored, DeferredItems) else getattr(output, name)[first:]
    )
    return items


def num_items(output: object, name: str) -> int:
    """How many items a field has, without making them."""
    stored = as_stored(output, name)
    return len(stored) if isinstance(stored, DeferredItems) else len(getattr(output, name))
