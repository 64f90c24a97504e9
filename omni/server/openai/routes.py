"""The addresses of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from engine import AudioTask
from omni.server.openai.chat import Chat
from omni.server.openai.chat_request import ChatRequest, CompletionRequest
from omni.server.openai.completions import Completions
from omni.server.openai.embeddings import Embeddings, EmbeddingsRequest
from omni.server.openai.realtime import talk
from omni.server.openai.speech import Speech, SpeechRequest
from omni.server.openai.transcription import Transcription, read_transcription
from omni.server.serving.pipeline_server import PipelineServer, PipelineState, ServedPipeline
from omni.server.serving.request_body import ApiModel, read_json

__all__ = ["ROUTES"]


def _json_route(path: str, body: type[ApiModel], response: Callable[..., Response]) -> Route:
    """Make a route that takes JSON documents."""

    async def respond(request: Request) -> Response:
        parsed: Any = await read_json(request, body)
        return response(request.state.server, request.state.client, parsed)

    return Route(path, respond, methods=["POST"])


def _form_route(path: str, task: AudioTask) -> Route:
    """Make a route that takes forms with a file of speech."""

    async def respond(request: Request) -> Response:
        body, audio = await read_transcription(request)
        return Transcription(request.state.server, request.state.client, body, audio, task)

    return Route(path, respond, methods=["POST"])


async def _list_models(request: Request) -> Response:
    """All pipelines, those included that are still loading."""
    pipelines = _server(request).pipelines.values()
    return JSONResponse({"object": "list", "data": [_model(each) for each in pipelines]})


async def _retrieve_model(request: Request) -> Response:
    return JSONResponse(_model(_server(request).find(request.path_params["name"])))


async def _list_voices(request: Request) -> Response:
    """The voices of one pipeline, or of all that are loaded."""
    server, name = _server(request), request.query_params.get("model")
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


def _server(request: Request) -> PipelineServer:
    server: PipelineServer = request.state.server
    return server


def _model(pipeline: ServedPipeline) -> dict[str, object]:
    return {
        "id": pipeline.name,
        "object": "model",
        "created": pipeline.created,
        "owned_by": "omni",
        **pipeline.describe(),
    }


ROUTES: Sequence[BaseRoute] = (
    _json_route("/v1/chat/completions", ChatRequest, Chat),
    _json_route("/v1/completions", CompletionRequest, Completions),
    _json_route("/v1/embeddings", EmbeddingsRequest, Embeddings),
    _json_route("/v1/audio/speech", SpeechRequest, Speech),
    _form_route("/v1/audio/transcriptions", "transcribe"),
    _form_route("/v1/audio/translations", "translate"),
    Route("/v1/audio/voices", _list_voices),
    WebSocketRoute("/v1/realtime", talk),
    Route("/v1/models", _list_models),
    Route("/v1/models/{name}", _retrieve_model),
)
