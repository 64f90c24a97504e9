"""Replaces every value of a JSON file with every kind of wrong value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 3, 10**9, 10**18, -(10**18), 0.5, -1.5, 1e300, float("inf"), True, False, None),
    *("", "x", "1e9", [], [0], [-1], [10**9], ["x"], [[1, 2]], {}, {"x": 1}, [[[[]]]]),
)
# A larger dict is a vocabulary.
_MOST_KEYS = 100


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A config with one value replaced or removed."""

    key: str
    what: str
    text: str


def config_changes(config: dict[str, Any]) -> Iterator[ConfigChange]:
    """Yield all changes, one position at a time."""
    for place in _places(config):
        outer = _at(config, place[:-1])
        for value in _VALUES:
            if value != outer[place[-1]] or type(value) is not type(outer[place[-1]]):
                changed = deepcopy(config)
                _at(changed, place[:-1])[place[-1]] = value
                what = f"{'.'.join(place)} = {value!r}"
                yield ConfigChange(place[-1], what, json.dumps(changed))
        changed = deepcopy(config)
        del _at(changed, place[:-1])[place[-1]]
        yield ConfigChange(place[-1], f"{'.'.join(place)} left out", json.dumps(changed))


def _places(config: dict[str, Any], outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*outer, key)
        if isinstance(value, dict) and len(value) <= _MOST_KEYS:
            yield from _places(value, (*outer, key))


def _at(config: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    for key in place:
        config = config[key]
    return config
