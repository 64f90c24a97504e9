"""What is added to single tokens' logits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from engine.interface.placed_error import PlacedError

__all__ = ["TokenBias"]

_LARGEST = 100
"""To either side, as in OpenAI's API."""

_PAST_IDS = 10**18
"""Above all token ids: what has more digits is not worth telling."""

_DIGITS = re.compile("[0-9]{1,18}")
"""A token id where keys are text, as in JSON."""

_LONGEST_SHOWN = 80


class TokenBias(Mapping[int, float]):
    """A mapping of token ids to numbers that can be hashed, and not changed; in order of the ids.

    Args:
        by_id: made by :meth:`of`, which checks.
    """

    __slots__ = ("_by_id",)

    def __init__(self, by_id: Mapping[int, float]) -> None:
        self._by_id = {token_id: by_id[token_id] for token_id in sorted(by_id)}

    @classmethod
    def of(cls, value: object) -> TokenBias:
        """Check what a user gave. The first mistake is told: there may be a million of them.

        Args:
            value: a mapping; its keys may be strings of digits, as JSON has no others.

        Raises:
            PlacedError: it is no mapping, a key is no token id or comes twice, or a value is no
                number from -100 to 100; with the key as its place, where the value is wrong.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise PlacedError(
                (), f"should be a mapping of token ids to numbers, got {_shown(value)}"
            )
        by_id: dict[int, float] = {}
        for key, number in value.items():
            token_id = _token_id(key)
            if token_id in by_id:
                raise PlacedError((), f"has the token id {token_id} twice")
            by_id[token_id] = _number(token_id, number)
        return cls(by_id)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: Any, _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.of, serialization=core_schema.plain_serializer_function_ser_schema(dict)
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _schema: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "type": "object",
            "propertyNames": {"pattern": f"^{_DIGITS.pattern}$"},
            "additionalProperties": {"type": "number", "minimum": -_LARGEST, "maximum": _LARGEST},
        }

    def __getitem__(self, token_id: int) -> float:
        return self._by_id[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def __hash__(self) -> int:
        return hash(tuple(self._by_id.items()))

    def __repr__(self) -> str:
        return repr(self._by_id)


def _token_id(key: Any) -> int:
    if isinstance(key, str):
        is_id = _DIGITS.fullmatch(key) is not None
    else:
        is_id = _is_a(Integral, key) and 0 <= key < _PAST_IDS
    if is_id:
        return int(key)
    raise PlacedError(
        (), f"should have token ids as keys, whole numbers of at least 0, got {_shown(key)}"
    )


def _number(token_id: int, value: Any) -> float:
    if _is_a(Real, value) and -_LARGEST <= value <= _LARGEST:  # not so a NaN
        return float(value)
    raise PlacedError(
        (str(token_id),),
        f"should be a number from -{_LARGEST} to {_LARGEST}, got {_shown(value)}",
    )


def _is_a(number: type, value: object) -> bool:
    """Whether it is of a kind of numbers, such as NumPy's; True and False are of none."""
    kind = type(value)
    # The first, as most are and abstract classes take their time.
    return kind is int or (kind is not bool and isinstance(value, number))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."
