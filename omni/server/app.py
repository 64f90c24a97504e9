"""The application: every address of the server, and what it answers when something is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.interface.log_fields import package_logger
from omni.server.live_page import ROUTES as PAGE_ROUTES
from omni.server.openai.routes import ROUTES as OPENAI_ROUTES
from omni.server.pipeline_route import ROUTES as PIPELINE_ROUTES
from omni.server.serving.api_error import ApiError
from omni.server.serving.guard import REFUSAL, Guard
from omni.server.serving.pipeline_server import PipelineServer, PipelineState, ServedPipeline

if TYPE_CHECKING:
    from stages.worker.stage_link import WorkerState

__all__ = ["create_app"]

_logger = package_logger(__name__)


def create_app(server: PipelineServer) -> FastAPI:
    """Make the ASGI application of a server.

    Args:
        server: its pipelines are closed when the application ends.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await server.close()

    app = FastAPI(
        title="omni",
        lifespan=lifespan,
        # Plain ones: what FastAPI's would find out of a request, its body's model above all, is
        # read here by other rules, and looking takes a fifth of all that a request takes.
        routes=[
            *OPENAI_ROUTES,
            *PIPELINE_ROUTES,
            *PAGE_ROUTES,
            Route("/health", _health),
            Route("/metrics", _metrics),
        ],
        # Its pages of documentation would fetch scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.server = server
    app.add_middleware(
        Guard,
        settings=server.settings,
        check_room=server.check_room,
        spans=lambda: server.meters.spans,
    )
    app.add_exception_handler(ApiError, _tell_api_error)
    app.add_exception_handler(HTTPException, _tell_http_error)
    app.add_exception_handler(ClientDisconnect, _tell_client_left)
    app.add_exception_handler(Exception, _tell_mistake)
    return app


async def _health(request: Request) -> Response:
    server: PipelineServer = request.app.state.server
    pipelines = {name: _condition(pipeline) for name, pipeline in server.pipelines.items()}
    return JSONResponse(
        {"status": server.status, "pipelines": pipelines},
        HTTPStatus.OK if server.status == "ready" else HTTPStatus.SERVICE_UNAVAILABLE,
    )


def _condition(pipeline: ServedPipeline) -> dict[str, Any]:
    """How a pipeline is doing, and the workers of its stages, where these run elsewhere."""
    status, error = pipeline.state.value, pipeline.error
    if pipeline.lost_stages:
        status = PipelineState.FAILED.value
        error = f"no worker is left of {', '.join(pipeline.lost_stages)}"
    workers = pipeline.worker_states()
    waiting, starting = (_ended_in(workers, state) for state in ("waiting", "starting"))
    if waiting:
        error = f"waiting for a place in the cluster: {'; '.join(waiting)}"
    elif starting and error is None:
        # It is ready all the same: requests are taken, and wait for it.
        error = f"being started again: {'; '.join(starting)}"
    told: dict[str, Any] = {"status": status, "error": error}
    if workers:
        told["workers"] = {name: [asdict(each) for each in of] for name, of in workers.items()}
    return told


def _ended_in(workers: Mapping[str, Sequence[WorkerState]], state: str) -> list[str]:
    """Of the workers in a state, those that had ended before: of which stage, and what of."""
    return [
        f"{name}: {worker.last_end}"
        for name, of in workers.items()
        for worker in of
        if worker.state == state and worker.last_end is not None
    ]


async def _metrics(request: Request) -> Response:
    server: PipelineServer = request.app.state.server
    return Response(await asyncio.to_thread(server.meters.text), media_type=CONTENT_TYPE_LATEST)


async def _tell_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope["state"][REFUSAL] = error
    return Response(
        error.to_json(), error.status, headers=error.headers, media_type="application/json"
    )


async def _tell_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = ApiError(
        HTTPStatus(error.status_code),
        f"{request.method} {request.url.path!r:.80}: {error.detail}",
        headers=error.headers,
    )
    return await _tell_api_error(request, told)


async def _tell_client_left(request: Request, _: Exception) -> Response:
    error = ApiError.bad_request("the client left before all of its request had come")
    return await _tell_api_error(request, error)


async def _tell_mistake(request: Request, _: Exception) -> Response:
    """The exception itself goes to the log: it may name what is nobody else's business."""
    told = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server made a mistake; see its log")
    return await _tell_api_error(request, told)
