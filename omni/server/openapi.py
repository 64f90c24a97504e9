"""The server's addresses described as OpenAPI, from its routes and the models of their bodies."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.routing import BaseRoute, Route, WebSocketRoute

FORM, _JSON = "multipart/form-data", "application/json"
_SCHEMAS = "#/components/schemas/"
_MODE: JsonSchemaMode = "validation"
_ERROR = {"description": "an error in OpenAI's format, whose `param` names the wrong field"}


class BodyRoute(Route):
    """A POST whose body is checked against a model; a form has a file beside its fields."""

    def __init__(
        self, path: str, endpoint: Callable[..., Any], body: type[BaseModel], kind: str = _JSON
    ) -> None:
        super().__init__(path, endpoint, methods=["POST"])
        self.body, self.kind = body, kind


def describe_routes(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Describe all routes in OpenAPI 3.1; a WebSocket as the GET that it begins with."""
    posted = [each for each in routes if isinstance(each, BodyRoute)]
    models = list(dict.fromkeys((each.body, _MODE) for each in posted))
    references, defined = models_json_schema(models, ref_template=_SCHEMAS + "{model}")
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        assert isinstance(route, Route | WebSocketRoute)
        methods = sorted(getattr(route, "methods", {"GET"}) - {"HEAD"})
        described = (route.body if isinstance(route, BodyRoute) else route.endpoint).__doc__ or ""
        operation: dict[str, Any] = {
            "summary": _plain(described.partition("\n")[0]),
            "responses": {"200": {"description": "the answer"}, "default": _ERROR},
        }
        if names := list(route.param_convertors):
            place = {"in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [{"name": name, **place} for name in names]
        if isinstance(route, BodyRoute):
            if route.kind == FORM:
                fields = defined["$defs"][route.body.__name__]
                fields["properties"]["file"] = {"type": "string", "format": "binary"}
                fields["required"] = sorted({"file", *fields["required"]})
            content = {route.kind: {"schema": references[route.body, _MODE]}}
            operation["requestBody"] = {"required": True, "content": content}
        for method in methods:
            paths.setdefault(route.path, {})[method.lower()] = operation
    for schema in defined["$defs"].values():
        schema["description"] = _plain(schema.get("description", ""))
    return {
        "openapi": "3.1.0",
        "info": {"title": "omni serve", "version": version("omni-pipeline")},
        "paths": paths,
        "components": {"schemas": defined["$defs"]},
    }


def _plain(docstring: str) -> str:
    return re.sub(r"(:\w+:)?`+~?([^`]*)`+", r"`\2`", docstring)


def type_of(schema: Any) -> str:
    """Name the type of a field in a few words, for people."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_SCHEMAS)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " | ".join(dict.fromkeys(map(type_of, schema[key])))
    if "enum" in schema or "const" in schema:
        return " | ".join(map(repr, schema.get("enum", [schema.get("const")])))
    inner = schema.get("items")
    return f"list of {type_of(inner)}" if inner else str(schema.get("type", "any"))
