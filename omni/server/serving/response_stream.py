"""Streams of request outputs, buffered for slow readers, and the HTTP responses made of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine import Waveform
from engine.interface.log_fields import package_logger
from engine.interface.outputs import OutputDelta
from omni.requests.request import OmniAccumulator, OmniDelta, OmniRequest
from omni.server.serving.admission_queue import QueuePlace
from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client
from omni.server.serving.meters import RequestMeter
from omni.server.serving.pipeline_server import PipelineServer, ServedPipeline
from stages import StageOutput
from stages.stage_output import OutputAccumulator

if TYPE_CHECKING:
    from omni.runtime.driver import Ticket


@dataclass(frozen=True, slots=True)
class Update:
    """New output of the stream's request ``index``, with at most one delta per stage.

    ``is_last`` is true once the awaited stages have finished the request.
    """

    index: int
    delta: OmniDelta
    is_last: bool

    def of(self, stage: str) -> OutputDelta | None:
        """Return the delta of a stage; None if it has none."""
        return next((delta for name, delta in self.delta.deltas if name == stage), None)

    def sound(self, stage: str | None) -> Waveform | None:
        """Return the new audio of a stage; None if there is none, or ``stage`` is None."""
        delta = None if stage is None else self.of(stage)
        return None if delta is None else delta.audio


@dataclass(slots=True)
class _Running:
    """One request and its unread output."""

    request: OmniRequest
    place: QueuePlace
    meter: RequestMeter
    ticket: Ticket | None = None
    new: dict[str, OutputDelta | OutputAccumulator] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    last: OmniDelta | None = None
    error: BaseException | None = None

    def put(self, delta: OmniDelta) -> None:
        self.meter.record_delta(delta)
        self.last = delta
        for name, each in delta.deltas:
            before = self.new.get(name)
            if before is None:
                self.new[name] = each
            elif isinstance(before, OutputAccumulator):
                before.add(each)
            else:
                self.new[name] = so_far = OutputAccumulator(delta.request_id, name)
                so_far.add(before)
                so_far.add(each)
            if each.finished and each.failure is None:
                self.done.add(name)

    def take(self, last: OmniDelta) -> OmniDelta:
        new, self.new, self.last = self.new, {}, None
        deltas = (
            (name, each.as_delta() if isinstance(each, OutputAccumulator) else each)
            for name, each in new.items()
        )
        return replace(last, deltas=tuple(deltas))


class ResponseStream:
    """Runs a group of requests and streams their output.

    A slow reader gets everything since its last read as one merged delta per stage: it delays no
    other reader, and its buffer does not grow with the number of missed steps. Leaving the ``async
    with`` block aborts unfinished requests in every stage::

        async with ResponseStream(pipeline, client, requests, "prompt") as stream:
            async for update in stream.updates():
                ...

    Entering it raises an :class:`ApiError` if the pipeline is not ready or the queue is full.

    Args:
        prompt_param: name of the field with the client's prompt.
        stages: stages after which a request ends, without waiting for later ones. If empty, it
            ends after all stages.
    """

    def __init__(
        self,
        pipeline: ServedPipeline,
        client: Client,
        requests: Sequence[OmniRequest],
        prompt_param: str,
        stages: Sequence[str] = (),
    ) -> None:
        self._pipeline = pipeline
        self._client = client
        self._prompt_param = prompt_param
        self._requests = tuple(requests)
        self._stages = frozenset(stages)
        self._running: list[_Running] = []
        self._has_output = False
        self._reader: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        pipeline = self._pipeline
        self._driver, self._loop = pipeline.driver, asyncio.get_running_loop()
        timed = [
            RequestMeter(pipeline.meters, pipeline.name, self._client, each.request_id)
            for each in self._requests
        ]
        try:
            places = pipeline.queue.enter([each.priority for each in self._requests])
        except ApiError as error:
            for meter in timed:
                meter.end("rejected")
            error.is_recorded = True
            raise
        self._running = [
            _Running(*each) for each in zip(self._requests, places, timed, strict=True)
        ]
        for running in self._running:
            if running.place.admitted.done():
                self._on_admitted(running, running.place.admitted)
            else:
                running.place.admitted.add_done_callback(partial(self._on_admitted, running))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        unfinished = [each for each in self._running if not each.place.has_left]
        self._driver.discard(each.ticket for each in unfinished if each.ticket is not None)
        for running in unfinished:
            # A reader may abandon the remaining requests once it has enough output.
            self._end(running, "ok" if kind is None else "aborted")

    async def updates(self) -> AsyncIterator[Update]:
        """Yield new output until every request has ended.

        Raises:
            ApiError: a request failed: with status 400 if it was invalid, with 503 if a stage had
                no worker on admission, with 500 otherwise.
        """
        unfinished = set(range(len(self._running)))
        while unfinished:
            await self._wait_for_output()
            for index in sorted(unfinished):
                running = self._running[index]
                if running.error is not None:
                    raise self._failure(running.error)
                last = running.last
                if last is None:
                    continue
                is_done = bool(self._stages) and self._stages <= running.done
                if last.error is not None and not is_done:
                    raise self._refusal(last.error, is_refused=last.refused)
                is_last = last.finished or is_done
                if is_last:
                    unfinished.discard(index)
                yield Update(index, running.take(last), bool(is_last))

    async def last_outputs(self) -> list[Mapping[str, StageOutput]]:
        """Wait until every request has ended, and return the final outputs of each, by stage."""
        order = self._pipeline.omni.pipeline.final_stages
        whole = [OmniAccumulator(order) for _ in self._requests]
        async for update in self.updates():
            whole[update.index].add(update.delta)
        return [each.output().stages for each in whole]

    def _on_admitted(self, running: _Running, admitted: asyncio.Future[None]) -> None:
        """Submit a request, unless a stage has lost its workers since the request arrived."""
        if running.place.has_left or admitted.cancelled():
            return
        try:
            self._pipeline.check_stages()
        except ApiError as error:
            self._fail(running, error)
            return
        running.meter.begin()
        request, take = running.request, partial(self._on_event, running)
        wake = self._loop.call_soon_threadsafe
        try:
            running.ticket = self._driver.submit(
                request, str(request.request_id), lambda event: wake(take, event)
            )
        except RuntimeError as error:  # the pipeline is closed, or its driver has crashed
            self._fail(running, error)

    def _on_event(self, running: _Running, event: OmniDelta | BaseException) -> None:
        if running.place.has_left:
            return
        if isinstance(event, BaseException):
            self._fail(running, RuntimeError("the pipeline's driver has crashed"))
            return
        running.put(event)
        if event.finished:
            self._end(running, "ok")  # no effect if the meter has already recorded a failure
        self._wake_reader()

    def _fail(self, running: _Running, error: Exception) -> None:
        running.error = error
        self._end(running, "failed")
        self._wake_reader()

    def _end(self, running: _Running, status: str) -> None:
        self._pipeline.queue.leave(running.place)
        running.meter.end(status)

    def _wake_reader(self) -> None:
        self._has_output = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait_for_output(self) -> None:
        # A future: an asyncio.Event is several times slower, and this runs for every token.
        if not self._has_output:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._has_output = False

    def _failure(self, error: BaseException) -> ApiError:
        """Return the error of a pipeline that was closed or whose driver crashed."""
        if not isinstance(error, ApiError):
            self._pipeline.fail(f"{type(error).__name__}: {error}")
            message = f"the model {self._pipeline.name!r} cannot go on: {error}"
            error = ApiError.unavailable(message, "model_failed")
        error.is_recorded = True  # by the meter of its request
        return error

    def _refusal(self, message: str, *, is_refused: bool) -> ApiError:
        if is_refused:
            error = ApiError.bad_request(message, param=self._prompt_param, code="invalid_prompt")
        else:
            error = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="request_failed")
        error.is_recorded = True
        return error


_logger = package_logger(__name__)

EVENTS = "text/event-stream"

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


def event(content: bytes) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + content + b"\n\n"


class PipelineResponse(Response):
    """Base class of a response by one pipeline.

    Sends :meth:`pieces` if ``is_streamed``, else :meth:`whole`. The work is cancelled when the
    client disconnects or the request times out. A failure before the first piece gets its own
    status. A later failure is sent as an event in a stream of events, and breaks off any other
    stream, so that the client notices the missing rest. The constructor raises an
    :class:`ApiError` if the request is invalid.
    """

    prompt_param: ClassVar[str] = "prompt"
    """Name of the field with the client's prompt."""

    def __init__(
        self,
        request: Request,
        model: str,
        *,
        is_streamed: bool = False,
        media_type: str = EVENTS,
    ) -> None:
        # Keeps buffering proxies from delaying text.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self.server: PipelineServer = request.state.server
        self.client: Client = request.state.client
        self.pipeline = self.server.find(model)
        self.stages = self.pipeline.omni.pipeline
        self._is_streamed = is_streamed
        self._has_begun = False

    def stream(self, requests: Sequence[OmniRequest], stages: Sequence[str] = ()) -> ResponseStream:
        """Run requests on the pipeline; see :class:`ResponseStream`."""
        return ResponseStream(self.pipeline, self.client, requests, self.prompt_param, stages)

    async def whole(self) -> Response:
        """Create the response in one piece."""
        raise NotImplementedError

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the response piece by piece."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Create the response and send it."""
        timeout_s = self.server.settings.limits.request_timeout_s
        if not self._is_streamed:
            response = await while_connected(self.whole(), receive, timeout_s)
            if response is not None:
                await response(scope, receive, send)
            return
        try:
            await while_connected(self._send_pieces(send), receive, timeout_s)
        except Exception as error:  # re-raised unless too late to send a status
            if not self._has_begun:
                raise
            if isinstance(error, ApiError):
                _logger.info("a stream was broken off: %s", error)
            else:
                _logger.exception("a stream broke")
                error = ApiError.internal()
            if self.media_type == EVENTS:
                await self._send(send, event(error.to_json()), more=False)

    async def _send_pieces(self, send: Send) -> None:
        async with aclosing(self.pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                await self._send(send, piece, more=True)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = self.raw_headers
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def while_connected(
    work: Coroutine[Any, Any, Any], receive: Receive, timeout_s: float
) -> Any:
    """Await work, and cancel it when its client disconnects or the timeout expires.

    Returns:
        The work's result; None if the client has disconnected.

    Raises:
        ApiError: with status 504 on timeout; with 503 if the server stops without waiting.
        Exception: any error of the work.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        done, _ = await asyncio.wait(
            (task, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if task in done:
            return task.result()
        if gone in done:
            return None
        raise ApiError(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"the request was not done after {timeout_s:g} s, the server's limit, and was aborted",
            code="timeout",
            # Clients retry automatically, which would take as long.
            headers={"x-should-retry": "false"},
        )
    except asyncio.CancelledError:  # only the server's shutdown cancels a response
        raise ApiError.unavailable(
            "the server was stopped before the request was done", "stopping"
        ) from None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
