"""The OpenAPI description matches the server, as checked by jsonschema."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import jsonschema
import pytest
from jsonschema import Draft202012Validator

from omni.server.app import create_app
from tests.support.http_call import call
from tests.support.live_server import LiveServer


@pytest.fixture(scope="module")
def described(server: LiveServer) -> Any:
    status, _, content = call(f"{server.url}/openapi.json")
    assert status == 200
    return json.loads(content)


def checker(described: Any, path: str, kind: str = "application/json") -> Draft202012Validator:
    schema = described["paths"][path]["post"]["requestBody"]["content"][kind]["schema"]
    whole = schema | {"components": described["components"]}
    Draft202012Validator.check_schema(whole)
    return Draft202012Validator(whole)


def test_every_address_is_described(server: LiveServer, described: Any):
    routes = create_app(server.pipelines)._app.routes  # type: ignore[attr-defined]
    assert {route.path for route in routes} == set(described["paths"])
    for route in routes:
        for method in getattr(route, "methods", {"GET"}) - {"HEAD"}:
            operation = described["paths"][route.path][method.lower()]
            assert operation["summary"], route.path
            assert ("requestBody" in operation) == (method == "POST")
            names = re.findall(r"{(\w+)}", route.path)
            assert [each["name"] for each in operation.get("parameters", [])] == names


def test_the_schema_accepts_valid_bodies_and_refuses_others(described: Any):
    chat = checker(described, "/v1/chat/completions")
    hello = {"role": "user", "content": "Hello."}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}}
    body = {"model": "chat", "messages": [hello], "user": "me", "response_format": schema}
    chat.validate(body)
    wrongs: list[Any] = [{"messages": []}, {"temprature": 1}, {"audio": {"format": "midi"}}]
    for wrong in wrongs:
        with pytest.raises(jsonschema.ValidationError):
            chat.validate(body | wrong)
    checker(described, "/v1/responses").validate({"model": "chat", "input": [hello]})
    checker(described, "/v1/completions").validate({"model": "chat", "prompt": [[1, 2], [3]]})
    checker(described, "/tokenize").validate({"model": "chat", "prompt": "Hello."})
    form = checker(described, "/v1/audio/transcriptions", "multipart/form-data")
    form.validate({"file": "", "model": "chat", "response_format": "srt"})
    with pytest.raises(jsonschema.ValidationError):
        form.validate({"model": "chat"})


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        for name, value in attrs:
            assert name != "src", "nothing is fetched"
            (self.ids if name == "id" else self.links if name == "href" else set()).add(value)


def test_the_page_shows_every_path_and_loads_nothing(server: LiveServer, described: Any):
    status, headers, content = call(f"{server.url}/docs")
    text = content.decode()
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "style-src 'sha256-" in headers["content-security-policy"]
    for path in described["paths"]:
        assert f"<code>{path}</code>" in text
    page = Links()
    page.feed(text)
    assert page.ids == set(described["components"]["schemas"])
    assert page.links <= {"/openapi.json", *(f"#{each}" for each in page.ids)}
