"""Outputs of requests while they run, kept for a reader who may be slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Self

from omni.requests.request import OmniAccumulator, OmniDelta
from omni.server.serving.api_error import ApiError
from omni.server.serving.meters import RequestMeter
from stages.stage_output import OutputAccumulator

if TYPE_CHECKING:
    from engine import Waveform
    from engine.interface.outputs import OutputDelta
    from omni.runtime.omni import Omni
    from omni.server.serving.admission_queue import QueuePlace
    from omni.server.serving.parsed_request import ParsedRequest
    from omni.server.serving.pipeline_server import ServedPipeline
    from stages import StageOutput

__all__ = ["ResponseStream", "Update"]


@dataclass(frozen=True, slots=True)
class Update:
    """What is new of a request.

    Attributes:
        index: of the request among those of the stream.
        delta: what has come since the last update, one delta of each stage at most.
        is_last: whether the stages that are waited for are done with the request.
    """

    index: int
    delta: OmniDelta
    is_last: bool

    def of(self, stage: str) -> OutputDelta | None:
        """What is new in a stage."""
        return next((delta for name, delta in self.delta.deltas if name == stage), None)

    def sound(self, stage: str | None) -> Waveform | None:
        """The new sound of a stage; None if there is none, or no stage."""
        delta = None if stage is None else self.of(stage)
        return None if delta is None else delta.audio


@dataclass(slots=True)
class _Running:
    """One request, and what is new of it that the reader has not taken yet."""

    place: QueuePlace
    meter: RequestMeter
    new: dict[str, OutputDelta | OutputAccumulator] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    last: OmniDelta | None = None
    error: BaseException | None = None

    def put(self, delta: OmniDelta) -> None:
        self.meter.note(delta)
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
            if each.finished:
                self.done.add(name)

    def take(self, last: OmniDelta) -> OmniDelta:
        new, self.new, self.last = self.new, {}, None
        deltas = (
            (name, each.as_delta() if isinstance(each, OutputAccumulator) else each)
            for name, each in new.items()
        )
        return replace(last, deltas=tuple(deltas))


class ResponseStream:
    """Runs requests that belong together, and hands out their output as it comes.

    A slow reader finds all that has come since it last looked as one delta of each stage: it
    delays no other reader, and what is kept for it does not grow with the steps that it missed.
    Leaving the ``async with`` block aborts what still runs, in every stage::

        async with ResponseStream(pipeline, requests, "prompt") as stream:
            async for update in stream.updates():
                ...

    Entering it raises an :class:`ApiError` if the pipeline is not ready or too many requests wait.

    Args:
        pipeline: runs the requests.
        requests: each with its id.
        prompt_param: the field in which the client sent the prompt.
        stages: a request ends when these are done with it; later ones are not waited for. None
            named: when all are.
    """

    def __init__(
        self,
        pipeline: ServedPipeline,
        requests: Sequence[ParsedRequest],
        prompt_param: str,
        stages: Sequence[str] = (),
    ) -> None:
        self._pipeline = pipeline
        self._prompt_param = prompt_param
        self._requests = tuple(requests)
        self._stages = frozenset(stages)
        self._running: list[_Running] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._has_output = False
        self._reader: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        omni, meters = self._pipeline.omni, self._pipeline.meters
        timed = [RequestMeter(meters, self._pipeline.name, each) for each in self._requests]
        try:
            places = self._pipeline.queue.enter([each.priority for each in self._requests])
        except ApiError as error:
            for meter in timed:
                meter.end("rejected")
            error.is_recorded = True
            raise
        self._running = [_Running(*each) for each in zip(places, timed, strict=True)]
        self._tasks = [
            asyncio.create_task(self._run(omni, request, running))
            for request, running in zip(self._requests, self._running, strict=True)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for running in self._running:
            self._pipeline.queue.leave(running.place)
            # One that has ended keeps its status; a reader may leave others once it has enough.
            running.meter.end("ok" if kind is None else "aborted")
        # An error that a task ended with was raised by updates(), or its reader has left.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def updates(self) -> AsyncIterator[Update]:
        """Yield new output until every request has ended.

        Raises:
            ApiError: a request failed: with status 400 one that could not run as it was sent, with
                503 one that was admitted when a stage had no worker, with 500 any other.
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
                if last.error is not None:
                    raise self._refusal(last.error, is_refused=last.refused)
                is_last = last.finished or (self._stages and self._stages <= running.done)
                if is_last:
                    unfinished.discard(index)
                yield Update(index, running.take(last), bool(is_last))

    async def last_outputs(self) -> list[Mapping[str, StageOutput]]:
        """Wait until every request has ended, and return the whole outputs of each, by stage."""
        order = self._pipeline.omni.pipeline.final_stages
        whole = [OmniAccumulator(order) for _ in self._requests]
        async for update in self.updates():
            whole[update.index].add(update.delta)
        return [each.output().stages for each in whole]

    async def _run(self, omni: Omni, request: ParsedRequest, running: _Running) -> None:
        try:
            await running.place.admitted
            self._pipeline.check_stages()  # it may have waited long
            running.meter.begin()
            await omni.agenerate_deltas(request, partial(self._put, running))
        except Exception as error:  # raised by updates()
            running.error = error
            running.meter.end("failed")
        finally:
            self._pipeline.queue.leave(running.place)
            self._wake_reader()

    def _put(self, running: _Running, _: int, delta: OmniDelta) -> None:
        running.put(delta)
        self._wake_reader()

    def _wake_reader(self) -> None:
        self._has_output = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait_for_output(self) -> None:
        # An asyncio.Event takes several times as long, and this is waited for at every token.
        if not self._has_output:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._has_output = False

    def _failure(self, error: BaseException) -> ApiError:
        """Explain why a pipeline cannot go on: it was closed, or its driver crashed."""
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
