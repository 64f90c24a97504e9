"""JSON Schema of a pipeline's YAML file, for editors and other programs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from omni.pipelines.pipeline_config import PipelineConfig
from stages.stage import OneOrMore
from stages.stage_config import StageConfig, stage_kinds

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.M)
_OWN_KIND = r"^.+:[A-Za-z_]\w*$"
"""``file.py:Class``, whose keys only its class knows."""
_YAML_NAMES = {"sources": "from"}
"""Attributes with another name in YAML."""


class _YamlSchema(GenerateJsonSchema):
    """Adds the forms that our validators accept: a single name instead of a list of one."""

    def function_before_schema(
        self, schema: core_schema.BeforeValidatorFunctionSchema
    ) -> JsonSchemaValue:
        """Widen the schema of a list behind a validator."""
        inner = super().function_before_schema(schema)
        if inner.get("type") != "array":
            return inner
        forms = [inner, inner["items"]]
        if schema["function"]["function"] is OneOrMore.func:
            forms.append({"type": "null"})
        return {"anyOf": forms}


def config_schema(kinds: Mapping[str, type[StageConfig]] | None = None) -> dict[str, Any]:
    """Describe a YAML file: keys, types and bounds, for each known kind of stage.

    Constraints across several keys (edges, transforms, fitting models) are left to
    ``omni validate``.

    Args:
        kinds: kinds of stages by name; None for all known ones, including other packages'.

    Returns:
        A schema of draft 2020-12; the schema of each stage depends on its ``kind``.
    """
    kinds = stage_kinds() if kinds is None else kinds
    models: list[type[BaseModel]] = [PipelineConfig, *kinds.values()]
    places, schema = models_json_schema(
        [(model, "validation") for model in models], schema_generator=_YamlSchema
    )
    definitions: dict[str, Any] = schema["$defs"]
    classes = {model.__name__: model for model in models}
    for name, definition in definitions.items():
        _describe(definition, name, _inherited_docs(classes.get(name)))
    pipeline: dict[str, Any] = definitions.pop(PipelineConfig.__name__)
    pipeline["properties"]["stages"]["additionalProperties"] = {
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"anyOf": [{"enum": list(kinds)}, {"pattern": _OWN_KIND}]}},
        "allOf": [
            {
                "if": {"required": ["kind"], "properties": {"kind": {"const": kind}}},
                "then": places[model, "validation"],
            }
            for kind, model in kinds.items()
        ],
    }
    return {"$schema": _DIALECT, **pipeline, "title": "omni pipeline", "$defs": definitions}


def _inherited_docs(model: type[BaseModel] | None) -> str:
    """Return the docstrings of a class and its bases, the most general one first."""
    documented = [] if model is None else [each for each in model.__mro__ if each.__doc__]
    own = [each for each in documented if issubclass(each, StageConfig)]
    return "\n\n".join(inspect.cleandoc(each.__doc__ or "") for each in reversed(own))


def _describe(definition: dict[str, Any], name: str, inherited: str) -> None:
    """Set each key's description from its class's docstring, and the class's to the first part."""
    docs = inspect.cleandoc(definition.get("description", ""))
    docs_of = {
        _YAML_NAMES.get(key, key): " ".join(text.replace("``", "").split())
        for key, text in _ATTRIBUTE.findall(f"{inherited}\n\n{docs}")
    }
    properties: Mapping[str, dict[str, Any]] = definition.get("properties", {})
    for key, described in properties.items():
        described.pop("title", None)
        if key in docs_of and "description" not in described:
            described["description"] = docs_of[key]
    if docs:
        definition["description"] = docs.partition("\n\n")[0].replace("``", "")
    definition["title"] = name
