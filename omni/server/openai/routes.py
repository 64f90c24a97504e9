"""The addresses of OpenAI's API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omni.server.serving.pipeline_server import PipelineServer
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
