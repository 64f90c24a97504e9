"""Base class of all user settings, and readable messages for their validation errors."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from engine.interface.placed_error import KeyPath, PlacedError, shortened, suggest

_WORDS = {
    "a valid array": "a list",
    "a valid tuple": "a list",
    "a valid list": "a list",
    "an object": "a mapping",
    "a valid dictionary": "a mapping",
    "a valid string": "text",
}
"""Pydantic's terms of JSON or Python, replaced for users who may have written YAML."""

_SUBJECT = re.compile("^(Input|String|Tuple|List|Dictionary) (?=should )")
"""Pydantic's name of the value, redundant after the place."""

_COUNT = re.compile(" after validation, not [0-9]+$")
"""Pydantic's count of valid list items, redundant with the value."""

_ATTEMPT = re.compile(", unable to parse string as an? [a-z]+$")
"""Pydantic's failed parsing attempt, redundant with the value."""

_MAX_REPORTED = 10
"""Maximum mistakes in one message: each is compared with all known names."""


def explain_validation_error(
    error: ValidationError,
    model: type[BaseModel],
    data: Any,
    *,
    source: str | None = None,
    lines: Mapping[KeyPath, int | str] | None = None,
    within: KeyPath = (),
) -> str:
    """Describe every mistake that a validation found, one per line.

    Args:
        source: file that ``data`` came from, prefixed to each message.
        lines: known line numbers by place; for a place whose value does not come from ``source``,
            a text that names its origin, such as a flag.
        within: location of ``data`` itself, prefixed to each place.

    Returns:
        Lines such as ``two.yaml:7: stages.writer.engine.blok_size: unknown key; did you mean
        'block_size'?``.
    """
    messages = []
    findings = error.errors(include_url=False)
    places = [place_of(finding, data) for finding in findings[:_MAX_REPORTED]]
    around = {place[:length] for place in places for length in range(len(place))}
    for finding, place in zip(findings, places, strict=False):
        # A list of one invalid item is also "too short", an invalid mapping also "not a string".
        if finding["type"] in ("too_short", "string_type") and place in around:
            continue
        place, message = _explain(finding, model, data)
        line = _nearest_line(place, lines or {})
        at = dotted(within + place)
        if isinstance(line, str):
            # A flag already names its place.
            where = (line,) if line.endswith(at) else (line, at)
        else:
            where = (f"{source}:{line}" if line else source or "", at)
            message += _origins_hint(place, lines or {})
        messages.append(": ".join(part for part in (*where, message) if part))
    left = len(findings) - _MAX_REPORTED
    return "\n".join(dict.fromkeys([*messages, *([f"and {left} more"] if left > 0 else [])]))


def explain_value_error(error: ValidationError) -> str:
    """Describe the mistakes in a single value whose place is named elsewhere."""
    return explain_validation_error(error, BaseModel, None)


def dotted(place: KeyPath) -> str:
    """Format a place as ``stages.writer.outputs[0]``."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def place_of(finding: ErrorDetails, data: Any) -> KeyPath:
    """Return the location of a mistake in the data, without pydantic's own markers."""
    loc = finding["loc"]
    if finding["type"] == "missing":
        # The key may exist with a null, which a model may treat as missing.
        return (*_keys_of(loc[:-1], data), loc[-1])
    cause = finding.get("ctx", {}).get("error")
    return _keys_of(loc, data) + (cause.place if isinstance(cause, PlacedError) else ())


def _explain(finding: ErrorDetails, model: type[BaseModel], data: Any) -> tuple[KeyPath, str]:
    loc, context = finding["loc"], finding.get("ctx", {})
    place = place_of(finding, data)
    match finding["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            return place, "unknown key" + _key_hint(str(loc[-1]), _model_at(model, loc[:-1], data))
        case "missing":
            return place, "missing; it must be given"
        case "union_tag_not_found":
            return (*place, "kind"), "missing; it must be given"
        case "value_error":
            return place, str(context["error"])
        case "too_short" | "string_too_short" if not finding["input"]:
            return place, _empty_message(finding["type"], context["min_length"])
        case _:
            got = shortened(finding["input"]) + _number_hint(finding)
            return place, f"{_expected(finding['msg'])}, got {got}"


def _expected(message: str) -> str:
    """Rewrite pydantic's message about a value in a user's terms."""
    expected = _ATTEMPT.sub("", _COUNT.sub("", _SUBJECT.sub("", message)))
    for theirs, ours in _WORDS.items():
        expected = expected.replace(theirs, ours)
    return expected


def _empty_message(finding_type: str, needed: int) -> str:
    unit = "character" if finding_type == "string_too_short" else "item"
    count = f"1 {unit} is" if needed == 1 else f"{needed} {unit}s are"
    return f"must not be empty; at least {count} needed"


def _keys_of(loc: KeyPath, data: Any) -> KeyPath:
    """Keep the parts of a pydantic location that are keys of the data.

    Others name the member of a union, or are ``[key]`` if the key itself is wrong.
    """
    place: list[str | int] = []
    for part in loc:
        is_key = isinstance(data, dict) and part in data
        is_index = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if is_key or is_index:
            data = data[part]
            place.append(part)
    return tuple(place)


def _key_hint(key: str, model: type) -> str:
    """Suggest a replacement for an unknown key of a model.

    A model may have ``unknown_key_hints``: hints for keys that users are known to try.
    """
    hints: Mapping[str, str] = getattr(model, "unknown_key_hints", {})
    return f"; {hints[key]}" if key in hints else suggest(key, _annotations(model))


def _model_at(model: type, loc: KeyPath, data: Any) -> type:
    """Find the model of the mapping at ``loc``.

    A model may have ``model_for``: a function from a mapping to the subclass that validates it.
    """
    annotation: Any = model
    for part in loc:
        is_key = bool(_keys_of((part,), data))
        data = data[part] if is_key else data
        if isinstance(part, int):
            continue
        if not is_key:  # it names the member of a union, by a value of ``kind``
            tags = {m: typing.get_args(_annotations(m).get("kind")) for m in _members(annotation)}
            annotation = next((m for m in tags if part in tags[m]), annotation)
        elif typing.get_origin(annotation) is dict:
            annotation = typing.get_args(annotation)[1]
        else:
            annotation = _annotations(_members(annotation)[0])[part]
        if typing.get_origin(annotation) is not dict and isinstance(data, dict):
            by_data = getattr(_members(annotation)[0], "model_for", None)
            annotation = annotation if by_data is None else by_data(data)
    return _members(annotation)[0]


def _members(annotation: Any) -> list[type]:
    """List the models in an annotation: itself, or among a union's members."""
    if isinstance(annotation, type) and (
        issubclass(annotation, BaseModel) or is_dataclass(annotation)
    ):
        return [annotation]
    return [member for part in typing.get_args(annotation) for member in _members(part)]


def _annotations(model: type) -> dict[str, Any]:
    """Return the types of a model's fields by key."""
    if issubclass(model, BaseModel):
        fields = model.model_fields
    else:
        hints = typing.get_type_hints(model, include_extras=True)
        fields = {name: FieldInfo.from_annotation(hint) for name, hint in hints.items()}
    return {field.alias or name: field.annotation for name, field in fields.items()}


def _number_hint(finding: ErrorDetails) -> str:
    """Explain numbers that YAML 1.1 reads as strings, such as ``1e-5``."""
    value = finding["input"]
    if not isinstance(value, str) or not finding["type"].startswith(("float", "int")):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return " (a string; write it without quotes, and in YAML an exponent as 1.0e-5, not 1e-5)"


def _origins_hint(place: KeyPath, lines: Mapping[KeyPath, int | str]) -> str:
    """Name the origins of parts of a value, which may contain the mistake."""
    given = [
        line
        for part, line in lines.items()
        if isinstance(line, str) and part[: len(place)] == place
    ]
    return f" (with {', '.join(given)})" if given else ""


def _nearest_line(place: KeyPath, lines: Mapping[KeyPath, int | str]) -> int | str | None:
    while place:
        if place in lines:
            return lines[place]
        place = place[:-1]
    return None


class Settings(BaseModel):
    """Immutable settings, validated on construction and given by name.

    Raises:
        ValueError: one line per mistake, which names the class, the field, the expected and the
            given value; for an unknown field the nearest one. For settings of a file, the file's
            reader reports the mistakes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    def __init__(self, *values: Any, **fields: Any) -> None:
        cls = type(self)
        if values:
            required = [name for name, field in cls.model_fields.items() if field.is_required()]
            first = (*required, *cls.model_fields)[0]
            raise ValueError(
                f"{cls.__name__} takes its fields by name, such as {first}=..., got {values[0]!r}"
            )
        try:
            super().__init__(**fields)
        except ValidationError as error:
            message = explain_validation_error(error, cls, fields, source=cls.__name__)
        else:
            return
        raise ValueError(message)

    # This mark lets pydantic build nested settings without this constructor, so that the mistakes
    # of all are reported together, each with its full place.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError:
            pass
        else:
            return
        raise ValueError(
            f"{type(self).__name__}: {name} cannot be changed: make new ones, "
            f"model_copy(update={{{name!r}: ...}})"
        )
