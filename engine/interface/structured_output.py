"""Forms of structured output: JSON of a schema, a regular expression, a choice, a grammar."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from engine.interface.placed_error import PlacedError
from engine.interface.settings import Settings

_MAX_CHARS = 65_536
"""Maximum characters of a form: reading 10 times as many takes seconds."""
_MAX_GBNF_CHARS = 2**12
"""Maximum characters of GBNF, whose translation takes time quadratic in its length."""
_MAX_OPTIONAL_PROPERTIES = 480
"""Maximum optional properties of one object of a schema: llguidance takes a few more."""
_MAX_MULTIPLE = 10_000
"""Maximum common multiple of the divisors in a schema, whose remainders llguidance enumerates."""
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*-?([0-9]+(?:\.[0-9]+)?)')
_GBNF_RULE = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")

JSON_STYLE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""One line, as ``json.dumps`` writes: a model that may write spaces may do so forever."""

_JsonSchema = Annotated[str, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})]


class StructuredOutput(Settings):
    """The form that constrains a request's text, token by token: exactly one of these fields.

    Every token that would violate the form is masked, and the text may end only where it is
    complete (a text cut by ``max_tokens`` may be incomplete). llguidance reads the forms.

    Attributes:
        json_schema: a JSON Schema, as a mapping or as text. The JSON is on one line, as
            ``json.dumps`` writes it.
        json_object: true for any JSON object.
        regex: a regular expression that matches the whole text.
        choice: the allowed texts.
        grammar: a context-free grammar in the Lark dialect of llguidance, or in GBNF.

    Raises:
        ValueError: none or several are given, or one cannot be read, uses features that llguidance
            does not support, or is longer than 65,536 characters; an object of the schema has more
            than 480 optional properties, or its values of ``multipleOf`` a common multiple above
            10,000.
    """

    json_schema: _JsonSchema | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = Field(default=None, min_length=1)
    grammar: str | None = None

    @field_validator("json_schema", mode="before")
    @classmethod
    def _dump_schema(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            try:
                return json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"the schema cannot be written as JSON: {error}") from error
        return value

    @model_validator(mode="after")
    def _check_form(self) -> StructuredOutput:
        given = [
            name
            for name in type(self).model_fields
            if getattr(self, name) is not None and getattr(self, name) is not False
        ]
        if len(given) != 1:
            raise ValueError(
                "give one of json_schema, json_object, regex, choice and grammar, got "
                + (" and ".join(given) or "none")
            )
        (name,) = given
        size = len(str(getattr(self, name)))
        if size > _MAX_CHARS:
            raise PlacedError(
                (name,), f"has {size} characters; forms of at most {_MAX_CHARS} are taken"
            )
        if self.json_schema is not None:
            with suppress(json.JSONDecodeError, RecursionError):  # llguidance reports these
                number = _most_optional_properties(json.loads(self.json_schema))
                if (multiple := _common_multiple(self.json_schema)) > _MAX_MULTIPLE:
                    raise PlacedError(
                        (name,),
                        f"its values of multipleOf, without decimal points, have the common "
                        f"multiple {multiple}; at most {_MAX_MULTIPLE} is taken",
                    )
                if number > _MAX_OPTIONAL_PROPERTIES:
                    raise PlacedError(
                        (name,),
                        f"an object has {number} optional properties; at most "
                        f"{_MAX_OPTIONAL_PROPERTIES} are taken",
                    )
        from llguidance import LLMatcher  # imported only if a form is requested

        try:
            problem = LLMatcher.validate_grammar(self.compiled_form())
        except ValueError as error:
            problem = str(error)
        if problem:
            raise PlacedError((name,), f"cannot be read: {' '.join(problem.split())}")
        return self

    def compiled_form(self) -> str:
        """Return the form in llguidance's format."""
        from llguidance import LLMatcher, grammar_from
        from llguidance.gbnf_to_lark import gbnf_to_lark

        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.grammar is not None:
            if _GBNF_RULE.search(self.grammar) is None:
                return LLMatcher.grammar_from_lark(self.grammar)
            if len(self.grammar) > _MAX_GBNF_CHARS:
                raise ValueError(f"GBNF of more than {_MAX_GBNF_CHARS} characters; give it in Lark")
            try:
                return LLMatcher.grammar_from_lark(gbnf_to_lark(self.grammar))
            except Exception as error:  # it raises arbitrary exceptions
                raise ValueError(f"no GBNF that can be read: {error}") from error
        if self.choice is not None:
            return grammar_from("choice", json.dumps(self.choice))
        schema = self.json_schema if self.json_schema is not None else '{"type": "object"}'
        if '"format"' in schema:
            with suppress(ValueError, RecursionError):  # llguidance reports a malformed schema
                schema = json.dumps(without_unknown_formats(json.loads(schema)))
        return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)


def without_unknown_formats(schema: Any) -> Any:
    """Remove formats that llguidance refuses as unknown: they are only annotations."""
    if isinstance(schema, list):
        return [without_unknown_formats(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _VALUE_KEYS else without_unknown_formats(value)
        for key, value in schema.items()
        if key != "format" or not isinstance(value, str) or _is_known_format(value)
    }


def _most_optional_properties(schema: Any) -> int:
    """Return the number of optional properties of the object of a schema that has most."""
    if isinstance(schema, list):
        return max(map(_most_optional_properties, schema), default=0)
    if not isinstance(schema, dict):
        return 0
    properties, required = schema.get("properties"), schema.get("required")
    own = set(properties) if isinstance(properties, dict) else set[str]()
    if isinstance(required, list):
        own -= {name for name in required if isinstance(name, str)}
    return max(len(own), *map(_most_optional_properties, schema.values()), 0)


def _common_multiple(schema: str) -> int:
    """Return that of all values of ``multipleOf``, without decimal points and zeros at the end."""
    numbers = (Decimal(found).normalize().as_tuple().digits for found in _MULTIPLE.findall(schema))
    return math.lcm(*(int("".join(map(str, digits))) or 1 for digits in numbers))


_VALUE_KEYS = frozenset(("const", "enum", "default", "examples"))
"""Keys of a schema whose values are not schemas."""


@lru_cache(256)
def _is_known_format(name: str) -> bool:
    from llguidance import LLMatcher

    alone = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
    return not LLMatcher.validate_grammar(alone)
