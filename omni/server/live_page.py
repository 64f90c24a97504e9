"""The page at ``/``, and the figures that it shows."""

from __future__ import annotations

import asyncio
import hashlib
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

if TYPE_CHECKING:
    from omni.server.serving.pipeline_server import PipelineServer, ServedPipeline

__all__ = ["ROUTES"]


async def _show(_: Request) -> Response:
    """The page: one file that fetches nothing from elsewhere."""
    content, policy = _page()
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
    return Response(content, media_type="text/html; charset=utf-8", headers=headers)


async def _tell_figures(request: Request) -> Response:
    """Every pipeline with its stages, and what they have done so far."""
    server: PipelineServer = request.app.state.server
    told = await asyncio.to_thread(
        lambda: [_figures(pipeline) for pipeline in server.pipelines.values()]
    )
    return JSONResponse({"object": "list", "status": server.status, "data": told})


@cache
def _page() -> tuple[bytes, str]:
    """The file, and what browsers are told it may do: nothing but what stands in it."""
    text = (resources.files("omni.server") / "page.html").read_text("utf-8")
    allowed = {
        tag: b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        for tag, inner in re.findall(r"<(style|script)>(.*?)</\1>", text, re.S)
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed['script']}'; "
        f"style-src 'sha256-{allowed['style']}'; connect-src 'self'; img-src blob: data:; "
        "media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _figures(pipeline: ServedPipeline) -> dict[str, Any]:
    stats = pipeline.stats()
    return {
        "name": pipeline.name,
        "status": pipeline.state.value,
        "running": pipeline.turn_queue.num_running,
        "waiting": pipeline.turn_queue.num_waiting,
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


ROUTES: Sequence[BaseRoute] = (Route("/", _show), Route("/v1/pipelines", _tell_figures))
"""Where they are."""
