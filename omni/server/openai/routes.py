"""The addresses of OpenAI's API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omni.server.openai.chat import Chat
from omni.server.openai.chat_request import ChatRequest
from omni.server.openai.completion_request import CompletionRequest
from omni.server.openai.completions import Completions
from omni.server.serving.guard import Client
from omni.server.serving.live_response import EventStream, LiveResponse
from omni.server.serving.pipeline_server import PipelineServer
from omni.server.serving.request_body import read_json
from omni.server.serving.served_pipeline import ServedPipeline

__all__ = ["router"]

router = APIRouter(prefix="/v1")


@router.get("/models")
async def list_models(request: Request) -> Response:
    """Tell all pipelines, those included that are still loading."""
    pipelines = _server(request).pipelines.values()
    return JSONResponse({"object": "list", "data": [_model(each) for each in pipelines]})


@router.get("/models/{name}")
async def retrieve_model(request: Request, name: str) -> Response:
    """Tell one pipeline."""
    return JSONResponse(_model(_server(request).find(name)))


@router.post("/chat/completions")
async def chat(request: Request) -> Response:
    """Answer a chat."""
    body = await read_json(request, ChatRequest)
    server = _server(request)
    answer = Chat(server.find(body.model), _client(request), body)
    timeout_s = server.settings.limits.request_timeout_s
    if body.stream:
        return EventStream(answer.events(), timeout_s)
    return LiveResponse(answer.whole(), timeout_s)


@router.post("/completions")
async def completions(request: Request) -> Response:
    """Complete prompts."""
    body = await read_json(request, CompletionRequest)
    server = _server(request)
    limits = server.settings.limits
    answer = Completions(server.find(body.model), _client(request), body, limits.max_prompts)
    if body.stream:
        return EventStream(answer.events(), limits.request_timeout_s)
    return LiveResponse(answer.whole(), limits.request_timeout_s)


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
    }
