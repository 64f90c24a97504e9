"""The addresses of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from engine import AudioTask
from omni.server.openai.chat import Chat
from omni.server.openai.chat_request import ChatRequest, CompletionRequest, chat_prompt
from omni.server.openai.completions import Completions
from omni.server.openai.embeddings import Embeddings, EmbeddingsRequest
from omni.server.openai.realtime import RealtimeSession, refuse_session
from omni.server.openai.speech import Speech, SpeechRequest
from omni.server.openai.transcription import Transcription, read_transcription
from omni.server.serving.api_error import ApiError
from omni.server.serving.guard import REFUSAL, Client
from omni.server.serving.live_response import EventStream, LiveResponse, LiveStream
from omni.server.serving.pipeline_server import PipelineServer, PipelineState, ServedPipeline
from omni.server.serving.request_body import read_json

__all__ = ["ROUTES"]


async def _list_models(request: Request) -> Response:
    """Tell all pipelines, those included that are still loading."""
    pipelines = _server(request).pipelines.values()
    return JSONResponse({"object": "list", "data": [_model(each) for each in pipelines]})


async def _retrieve_model(request: Request) -> Response:
    """Tell one pipeline."""
    return JSONResponse(_model(_server(request).find(request.path_params["name"])))


async def _chat(request: Request) -> Response:
    """Answer a chat."""
    body = await read_json(request, ChatRequest)
    server = _server(request)
    pipeline = server.find(body.model)
    pipeline.check_room(_client(request))  # before files are decoded and fetched
    limits = server.settings.limits
    make_prompt = partial(chat_prompt, body.messages, server.fetcher, limits.max_body_bytes)
    answer = Chat(pipeline, _client(request), body, make_prompt)
    timeout_s = limits.request_timeout_s
    if body.stream:
        return EventStream(answer.events(), timeout_s)
    return LiveResponse(answer.whole(), timeout_s)


async def _completions(request: Request) -> Response:
    """Complete prompts."""
    body = await read_json(request, CompletionRequest)
    server = _server(request)
    limits = server.settings.limits
    answer = Completions(server.find(body.model), _client(request), body, limits.max_prompts)
    if body.stream:
        return EventStream(answer.events(), limits.request_timeout_s)
    return LiveResponse(answer.whole(), limits.request_timeout_s)


async def _embeddings(request: Request) -> Response:
    """Make embeddings."""
    body = await read_json(request, EmbeddingsRequest)
    server = _server(request)
    limits = server.settings.limits
    answer = Embeddings(server.find(body.model), _client(request), body, limits.max_prompts)
    return LiveResponse(answer.whole(), limits.request_timeout_s)


async def _speech(request: Request) -> Response:
    """Speak."""
    body = await read_json(request, SpeechRequest)
    server = _server(request)
    answer = Speech(server.find(body.model), _client(request), body)
    timeout_s = server.settings.limits.request_timeout_s
    if answer.is_streamed:
        return LiveStream(answer.pieces(), timeout_s, answer.media_type)
    return LiveResponse(answer.whole(), timeout_s)


async def _transcriptions(request: Request) -> Response:
    """Write what is said."""
    return await _transcription(request, "transcribe")


async def _translations(request: Request) -> Response:
    """Write in English what is said."""
    return await _transcription(request, "translate")


async def _realtime(websocket: WebSocket) -> None:
    """Talk."""
    offered = websocket.scope.get("subprotocols", ())
    await websocket.accept(subprotocol="realtime" if "realtime" in offered else None)
    server: PipelineServer = websocket.app.state.server
    model = websocket.query_params.get("model", "")
    client: Client = websocket.state.client
    try:
        with server.session():
            await RealtimeSession(websocket, server, server.find(model), client).run()
    except ApiError as error:
        websocket.scope["state"][REFUSAL] = error
        await refuse_session(websocket, error)


async def _list_voices(request: Request) -> Response:
    """List the voices of one pipeline, or of all that are loaded."""
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


async def _transcription(request: Request, task: AudioTask) -> Response:
    body, audio = await read_transcription(request)
    server = _server(request)
    answer = Transcription(server.find(body.model), _client(request), body, audio, task)
    return LiveResponse(answer.whole(), server.settings.limits.request_timeout_s)


def _client(request: Request) -> Client:
    client: Client = request.state.client
    return client


def _server(request: Request) -> PipelineServer:
    server: PipelineServer = request.app.state.server
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
    Route("/v1/chat/completions", _chat, methods=["POST"]),
    Route("/v1/completions", _completions, methods=["POST"]),
    Route("/v1/embeddings", _embeddings, methods=["POST"]),
    Route("/v1/audio/speech", _speech, methods=["POST"]),
    Route("/v1/audio/transcriptions", _transcriptions, methods=["POST"]),
    Route("/v1/audio/translations", _translations, methods=["POST"]),
    Route("/v1/audio/voices", _list_voices),
    WebSocketRoute("/v1/realtime", _realtime),
    Route("/v1/models", _list_models),
    Route("/v1/models/{name}", _retrieve_model),
)
"""Where they are."""
