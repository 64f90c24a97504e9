"""``/v1/pipelines/{name}``: every input and output of a pipeline, in the project's own schema."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine import Waveform
from engine.interface.outputs import OutputDelta
from engine.interface.placed_error import PlacedError
from engine.interface.settings import dotted
from omni.requests.request import OmniAccumulator, OmniRequest
from omni.requests.request_line import RequestLine
from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client
from omni.server.serving.pipeline_server import PipelineServer, ServedPipeline
from omni.server.serving.request_body import read_json
from omni.server.serving.response_stream import DONE, PipelineResponse, event
from stages import StageOutput

if TYPE_CHECKING:
    from torch import Tensor


class PipelineRequest(RequestLine):
    """A line of ``requests.jsonl`` with its files inline."""

    stream: bool = False


async def list_recent(request: Request) -> Response:
    """Report the timings of a pipeline's most recent requests made with the same API key."""
    server: PipelineServer = request.state.server
    client: Client = request.state.client
    records = server.meters.recent.of(server.find(request.path_params["name"]).name, client.tenant)
    return JSONResponse({"object": "list", "data": [each.to_object() for each in records]})


async def run_pipeline(request: Request) -> Response:
    """Run a request of any kind on a pipeline."""
    server: PipelineServer = request.state.server
    pipeline = server.find(request.path_params["name"])
    line = await read_json(request, PipelineRequest)
    omni = pipeline.omni
    server.check_room(request.state.client, pipeline.name)
    try:
        parsed = await asyncio.to_thread(_build_request, line, pipeline, request.state.client)
        omni.pipeline.merge_sampling(parsed.sampling)
        omni.pipeline.voices.find(parsed.speaker)
    except ValueError as error:
        raise ApiError.bad_request(str(error), param=_param(error, line)) from error
    return _PipelineOutput(request, pipeline.name, line, parsed)


def _build_request(line: PipelineRequest, pipeline: ServedPipeline, client: Client) -> OmniRequest:
    # Imported lazily: the server must respond before torch is imported.
    from omni.requests.request_line import prompt_of, sampling_of

    own = {name: stage.own_sampling for name, stage in pipeline.config.stages.items()}
    return client.request(
        prompt_of(line, _InlineFiles()),
        sampling_of(line.sampling, own),
        priority=line.priority,
        cache_salt=line.cache_salt,
        speaker=line.speaker,
    )


def _param(error: ValueError, line: PipelineRequest) -> str | None:
    """Return the key at fault: the one that begins the message, or its path in ``sampling``.

    None if the line does not itself set the invalid field of a stage's sampling.
    """
    if not isinstance(error, PlacedError):
        message = str(error)
        key = "speaker" if message.startswith("speaker ") else message.partition(":")[0]
        return key if key.partition(".")[0] in PipelineRequest.model_fields else None
    stage, *field = error.place
    given = line.sampling
    for_it = given.get(str(stage))
    if isinstance(for_it, Mapping) and (not field or field[0] in for_it):
        return dotted(("sampling", stage, *field))
    return dotted(("sampling", *field)) if field and field[0] in given else None


class _PipelineOutput(PipelineResponse):
    """All outputs of one request, under the id given by its client."""

    def __init__(
        self, request: Request, name: str, line: PipelineRequest, parsed: OmniRequest
    ) -> None:
        super().__init__(request, name, is_streamed=line.stream)
        self._request = parsed
        self._request_id = line.request_id or parsed.request_id

    async def whole(self) -> Response:
        """Return a line of ``outputs.jsonl`` with its files inline."""
        async with self.stream([self._request]) as stream:
            (last,) = await stream.last_outputs()
        content = json.dumps(await asyncio.to_thread(self._line, last), allow_nan=False)
        return Response(content, media_type="application/json")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield each stage's new output as it arrives, then the whole line."""
        whole = OmniAccumulator(self.stages.final_stages)
        async with self.stream([self._request]) as stream:
            async for update in stream.updates():
                whole.add(update.delta)
                new = {name: each for name, delta in update.delta.deltas if (each := _new(delta))}
                if new:
                    yield _event({"request_id": self._request_id, "stages": new})
        yield _event(await asyncio.to_thread(self._line, whole.output().stages)) + DONE

    def _line(self, last: Mapping[str, StageOutput]) -> dict[str, Any]:
        from omni.requests.output_writer import describe_stage  # lazy, as above

        def wav(sound: Waveform) -> str:
            return b64encode(sound.encoded("wav")).decode()

        finals = self.pipeline.config.stages
        return {
            "request_id": self._request_id,
            "error": None,
            "stages": {
                name: describe_stage(output, finals[name].final_output, tensor=_encode, sound=wav)
                for name, output in last.items()
            },
        }


def _new(delta: OutputDelta) -> Mapping[str, Any]:
    """Return the fields of an event for a stage's new output."""
    new: dict[str, Any] = {}
    if delta.text:
        new["delta"] = delta.text
    if delta.audio is not None:
        new["audio_delta"] = b64encode(delta.audio.encoded("pcm16")).decode()
        new["sampling_rate"] = delta.audio.sampling_rate
    return new


class _InlineFiles:
    """Files inline in a request, where a line of ``requests.jsonl`` names a path.

    Images, audio and videos are data URLs; tensors are a safetensors file in base64. See
    :class:`~omni.requests.request_line.RequestFiles`.
    """

    def item(self, key: str, name: str) -> bytes:
        """Decode an image, audio or video from its data URL."""
        head, comma, data = name.partition(",")
        head = head.lower()
        if not (comma and head.startswith("data:") and head.endswith(";base64")):
            raise ValueError(
                f"{key}: must be a data URL, such as 'data:audio/wav;base64,...': a server reads "
                f"no files of its own, got {name!r:.80}"
            )
        return _decode_base64(key, data)

    def at_url(self, key: str, url: str) -> bytes:
        """Decode the file of a message part."""
        return self.item(key, url)

    def embeds(self, name: str) -> Tensor:
        """Decode a tensor ``(tokens, hidden)``."""
        from safetensors import SafetensorError  # lazy, as above
        from safetensors.torch import load

        from omni.requests.request_line import only_embeds

        try:
            tensors = load(_decode_base64("prompt_embeds", name))
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f"prompt_embeds: must be a safetensors file in base64: {error}"
            ) from error
        return only_embeds(tensors, "prompt_embeds")


def _decode_base64(key: str, data: str) -> bytes:
    try:
        return b64decode(data, validate=True)
    except ValueError as error:
        raise ValueError(f"{key}: not valid base64: {error}") from error


def _event(content: Mapping[str, Any]) -> bytes:
    return event(json.dumps(content, allow_nan=False).encode())


def _encode(name: str, rows: Tensor) -> str:
    from safetensors.torch import save  # lazy, as above

    return b64encode(save({name: rows.contiguous()})).decode()
