"""ASGI application: all routes of the server, including those that describe the server itself."""

from __future__ import annotations

import asyncio
import hashlib
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import lru_cache
from http import HTTPStatus
from importlib import resources
from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute

from engine import AudioTask
from omni.server.openai.chat import Chat, Completions
from omni.server.openai.chat_request import ChatRequest, CompletionRequest
from omni.server.openai.embeddings import Embeddings, EmbeddingsRequest
from omni.server.openai.realtime import talk
from omni.server.openai.responses import (
    Responses,
    ResponsesRequest,
    delete_response,
    show_response,
)
from omni.server.openai.speech import Speech, SpeechRequest
from omni.server.openai.tokenize import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from omni.server.openai.transcription import (
    Transcription,
    TranscriptionRequest,
    read_transcription,
)
from omni.server.pipeline_route import PipelineRequest, list_recent, run_pipeline
from omni.server.serving.guard import Guard
from omni.server.serving.pipeline_server import PipelineServer, PipelineState, ServedPipeline
from omni.server.serving.request_body import ApiModel, read_json
from stages.worker.stage_link import WorkerState


def create_app(server: PipelineServer) -> Guard:
    """Create the ASGI application of a server; its pipelines are closed at shutdown."""

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        await server.close()

    routes = (
        _json_route("/v1/chat/completions", ChatRequest, Chat),
        _json_route("/v1/responses", ResponsesRequest, Responses),
        Route("/v1/responses/{id}", show_response),
        Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
        _json_route("/v1/completions", CompletionRequest, Completions),
        _json_route("/v1/embeddings", EmbeddingsRequest, Embeddings),
        _json_route("/v1/audio/speech", SpeechRequest, Speech),
        _form_route("/v1/audio/transcriptions", "transcribe"),
        _form_route("/v1/audio/translations", "translate"),
        Route("/v1/audio/voices", _list_voices),
        WebSocketRoute("/v1/realtime", talk),
        Route("/v1/models", _list_models),
        Route("/v1/models/{name}", _retrieve_model),
        Route("/v1/pipelines", _list_stats),
        BodyRoute("/v1/pipelines/{name}", run_pipeline, PipelineRequest),
        Route("/v1/pipelines/{name}/requests", list_recent),
        Route("/", _page),
        BodyRoute("/tokenize", tokenize, TokenizeRequest),
        BodyRoute("/detokenize", detokenize, DetokenizeRequest),
        Route("/version", _version),
        Route("/health", _health),
        Route("/metrics", _metrics),
        Route("/openapi.json", _openapi),
        Route("/docs", _docs),
    )
    return Guard(Router(routes, lifespan=lifespan), server)


def _json_route(path: str, body: type[ApiModel], response: Callable[..., Response]) -> Route:
    async def respond(request: Request) -> Response:
        parsed: Any = await read_json(request, body)
        return response(request, parsed)

    return BodyRoute(path, respond, body)


def _form_route(path: str, task: AudioTask) -> Route:
    async def respond(request: Request) -> Response:
        body, audio = await read_transcription(request)
        return Transcription(request, body, audio, task)

    return BodyRoute(path, respond, TranscriptionRequest, FORM)


async def _list_models(request: Request) -> Response:
    """List all pipelines, without aliases."""
    pipelines = request.state.server.pipelines
    return JSONResponse({"object": "list", "data": [_model(*each) for each in pipelines.items()]})


async def _retrieve_model(request: Request) -> Response:
    """Describe one pipeline."""
    name = request.path_params["name"]
    return JSONResponse(_model(name, request.state.server.find(name)))


async def _list_voices(request: Request) -> Response:
    """List the voices of one pipeline, or of all loaded pipelines."""
    server: PipelineServer = request.state.server
    name = request.query_params.get("model")
    if name is None:
        found = [each for each in server.pipelines.values() if each.state is PipelineState.READY]
    else:
        found = [server.find(name)]
    voices = {each.name: each.omni.pipeline.voices for each in found}
    listed = [
        {"id": voice, "name": voice, "model": model, "aliases": of.other_names(voice)}
        for model, of in voices.items()
        for voice in of.own
    ]
    return JSONResponse({"object": "list", "voices": listed})


def _model(name: str, pipeline: ServedPipeline) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": pipeline.created,
        "owned_by": "omni",
        **pipeline.describe(),
    }


async def _version(_: Request) -> Response:
    """The version of omni-pipeline."""
    return JSONResponse({"version": version("omni-pipeline")})


async def _page(_: Request) -> Response:
    """Web page: a single file without external resources."""
    return _html(_read_file("page.html"))


async def _openapi(request: Request) -> Response:
    """This description of all routes, for programs."""
    return JSONResponse(await _description(request))


async def _docs(request: Request) -> Response:
    """This description of all routes, for people."""
    import jinja2  # slow to import, and rarely needed

    page = jinja2.Environment(autoescape=True).from_string(_read_file("docs.html"))
    return _html(page.render(await _description(request), type_of=type_of))


async def _description(request: Request) -> dict[str, Any]:
    return await asyncio.to_thread(describe_routes, request.scope["router"].routes)


def _read_file(name: str) -> str:
    return (resources.files("omni.server") / name).read_text("utf-8")


@lru_cache(maxsize=2)
def _html(text: str) -> Response:
    """Return a page with a content security policy that allows only its own inline code."""
    policy = "default-src 'none'; "
    for tag, inner in sorted(re.findall(r"<(style|script)>(.*?)</\1>", text, re.S)):
        digest = b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        policy += f"{tag}-src 'sha256-{digest}'; "
    policy += (
        "connect-src 'self'; img-src blob: data:; media-src blob:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
    return Response(text, media_type="text/html; charset=utf-8", headers=headers)


async def _health(request: Request) -> Response:
    """Readiness of the server and its pipelines."""
    server: PipelineServer = request.state.server
    pipelines = {name: _describe_health(pipeline) for name, pipeline in server.pipelines.items()}
    return JSONResponse(
        {"status": server.status, "pipelines": pipelines},
        HTTPStatus.OK if server.status == "ready" else HTTPStatus.SERVICE_UNAVAILABLE,
    )


def _describe_health(pipeline: ServedPipeline) -> dict[str, Any]:
    """Describe the state of a pipeline, and of its stages' workers if they are remote."""
    status, error = pipeline.state.value, pipeline.error
    if pipeline.lost_stages:
        status = PipelineState.FAILED.value
        error = f"no worker is left of {', '.join(pipeline.lost_stages)}"
    workers = pipeline.worker_states()
    waiting, starting = (_describe_ended(workers, state) for state in ("waiting", "starting"))
    if waiting:
        error = f"waiting for a place in the cluster: {'; '.join(waiting)}"
    elif starting and error is None:
        # Still ready: requests are accepted, and wait for it.
        error = f"being started again: {'; '.join(starting)}"
    condition: dict[str, Any] = {"status": status, "error": error}
    if workers:
        condition["workers"] = {name: [asdict(each) for each in of] for name, of in workers.items()}
    return condition


def _describe_ended(workers: Mapping[str, Sequence[WorkerState]], state: str) -> list[str]:
    """List the workers in this state that ended before, with their stage and exit reason."""
    return [
        f"{name}: {worker.last_end}"
        for name, of in workers.items()
        for worker in of
        if worker.state == state and worker.last_end is not None
    ]


async def _metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    server: PipelineServer = request.state.server
    return Response(await asyncio.to_thread(server.meters.text), media_type=CONTENT_TYPE_LATEST)


async def _list_stats(request: Request) -> Response:
    """All pipelines with the counters of their stages, for the web page."""
    server: PipelineServer = request.state.server
    data = await asyncio.to_thread(
        lambda: [_stats_of(pipeline) for pipeline in server.pipelines.values()]
    )
    return JSONResponse({"object": "list", "status": server.status, "data": data})


def _stats_of(pipeline: ServedPipeline) -> dict[str, Any]:
    stats = pipeline.stats()
    return {
        "name": pipeline.name,
        "status": pipeline.state.value,
        "running": pipeline.queue.num_running,
        "waiting": pipeline.queue.num_waiting,
        "stages": [
            {
                "name": name,
                "kind": stage.kind,
                "inputs": list(stage.inputs.sources) if stage.inputs is not None else [],
                "final_output": list(stage.final_output),
                "stats": asdict(stats[name]) if name in stats else None,
            }
            for name, stage in pipeline.config.stages.items()
        ],
    }


FORM, _JSON = "multipart/form-data", "application/json"
_SCHEMAS = "#/components/schemas/"
_MODE: JsonSchemaMode = "validation"
_ERROR = {"description": "an error in OpenAI's format, whose `param` names the wrong field"}


class BodyRoute(Route):
    """POST route whose body is validated against a model; a form has a file besides its fields."""

    def __init__(
        self, path: str, endpoint: Callable[..., Any], body: type[BaseModel], kind: str = _JSON
    ) -> None:
        super().__init__(path, endpoint, methods=["POST"])
        self.body, self.kind = body, kind


def describe_routes(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Describe all routes in OpenAPI 3.1; a WebSocket as the GET of its handshake."""
    posted = [each for each in routes if isinstance(each, BodyRoute)]
    models = list(dict.fromkeys((each.body, _MODE) for each in posted))
    references, defined = models_json_schema(models, ref_template=_SCHEMAS + "{model}")
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        assert isinstance(route, Route | WebSocketRoute)
        methods = sorted(getattr(route, "methods", {"GET"}) - {"HEAD"})
        described = (route.body if isinstance(route, BodyRoute) else route.endpoint).__doc__ or ""
        operation: dict[str, Any] = {
            "summary": _without_roles(described.partition("\n")[0]),
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
        schema["description"] = _without_roles(schema.get("description", ""))
    return {
        "openapi": "3.1.0",
        "info": {"title": "omni serve", "version": version("omni-pipeline")},
        "paths": paths,
        "components": {"schemas": defined["$defs"]},
    }


def _without_roles(docstring: str) -> str:
    return re.sub(r"(:\w+:)?`+~?([^`]*)`+", r"`\2`", docstring)


def type_of(schema: Any) -> str:
    """Return a short human-readable name of a field's type."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_SCHEMAS)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " | ".join(dict.fromkeys(map(type_of, schema[key])))
    if "enum" in schema or "const" in schema:
        return " | ".join(map(repr, schema.get("enum", [schema.get("const")])))
    inner = schema.get("items")
    return f"list of {type_of(inner)}" if inner else str(schema.get("type", "any"))
