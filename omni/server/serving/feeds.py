"""What comes of some requests while they run, kept for a reader who may be slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Self

from omni.server.serving.api_error import ApiError
from omni.server.serving.meters import RequestMeter

if TYPE_CHECKING:
    from engine import Waveform
    from omni.requests.request import OmniOutput
    from omni.runtime.omni import Omni
    from omni.server.serving.asked import AskedRequest
    from omni.server.serving.pipeline_server import ServedPipeline
    from omni.server.serving.turn_queue import QueuePlace
    from stages import StageOutput

__all__ = ["Feeds", "Update", "outputs_of_stage"]


@dataclass(frozen=True, slots=True)
class Update:
    """What is new of a request.

    Attributes:
        index: of the request among those asked for together.
        output: its state now. Texts are whole; its ``delta`` and ``audio_delta`` mean nothing, as
            several outputs may have come since the last update.
        sounds: by stage, the pieces of sound that came since then.
    """

    index: int
    output: OmniOutput
    sounds: Mapping[str, Sequence[Waveform]]

    def has_finished(self, *stages: str | None) -> bool:
        """Whether each of these stages is done with the request; None stands for no stage."""
        made = self.output.stages
        for name in stages:
            if name is not None and (name not in made or not made[name].finished):
                return False
        return True


@dataclass(slots=True)
class _Feed:
    """One request: what it has put out that its reader has not taken yet."""

    place: QueuePlace
    meter: RequestMeter
    output: OmniOutput | None = None
    sounds: dict[str, list[Waveform]] = field(default_factory=dict)
    error: BaseException | None = None
    is_over: bool = False

    def put(self, output: OmniOutput) -> None:
        self.meter.note(output)
        self.output = output
        self.is_over = output.finished
        for name, stage in output.stages.items():
            if stage.audio_delta is not None:
                self.sounds.setdefault(name, []).append(stage.audio_delta)

    def take(self, index: int) -> Update | None:
        if self.output is None:
            return None
        update = Update(index, self.output, self.sounds)
        self.output, self.sounds = None, {}
        return update


class Feeds:
    """Runs requests that belong together, and hands out what comes of them.

    A reader that is slow finds the newest state, with all the sound since it last looked: it holds
    up no one, and what is kept for it does not grow with the number of steps that it missed.
    Leaving the ``async with`` aborts what still runs, in every stage::

        async with Feeds(pipeline, requests) as feeds:
            async for update in feeds.updates():
                ...

    Args:
        pipeline: which to run them on.
        requests: each with its id.
        prompt_param: what the client called the prompt.

    Raises:
        ApiError: on entering, the pipeline is not ready, or too many requests wait.
    """

    def __init__(
        self,
        pipeline: ServedPipeline,
        requests: Sequence[AskedRequest],
        prompt_param: str,
    ) -> None:
        self._pipeline = pipeline
        self._prompt_param = prompt_param
        self._requests = tuple(requests)
        self._feeds: list[_Feed] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._has_news = False
        self._reader: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        omni, meters = self._pipeline.omni, self._pipeline.meters
        assert meters is not None
        timed = [RequestMeter(meters, self._pipeline.name, each) for each in self._requests]
        try:
            places = self._pipeline.turn_queue.take([each.priority for each in self._requests])
        except ApiError as error:
            for meter in timed:
                meter.end("rejected")
            error.is_recorded = True
            raise
        self._feeds = [_Feed(*each) for each in zip(places, timed, strict=True)]
        self._tasks = [
            asyncio.create_task(self._run(omni, request, feed))
            for request, feed in zip(self._requests, self._feeds, strict=True)
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
        for feed in self._feeds:
            self._pipeline.turn_queue.leave(feed.place)
            # One that has ended keeps its status; a reader may leave others once it has enough.
            feed.meter.end("ok" if kind is None else "aborted")
        # An error that a task ended with was raised by updates(), or its reader has left.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def updates(self) -> AsyncIterator[Update]:
        """Yield what is new until every request has ended.

        Raises:
            ApiError: a request failed: with status 400 one that could not run as it was asked for,
                with 503 one whose turn came when a stage had no worker, with 500 any other.
        """
        told = [False] * len(self._feeds)
        while not all(told):
            await self._wait_for_news()
            for index, feed in enumerate(self._feeds):
                told[index] |= feed.is_over
                if feed.error is not None:
                    raise _recorded(self._failure(feed.error))
                update = feed.take(index)
                if update is None:
                    continue
                if update.output.error is not None:
                    raise _recorded(self._refusal(update.output))
                yield update

    async def _run(self, omni: Omni, request: AskedRequest, feed: _Feed) -> None:
        try:
            await feed.place.turn()
            self._pipeline.check_stages()  # it may have waited long
            feed.meter.begin()
            put = partial(self._put, feed)
            await omni.agenerate(request, on_progress=put)
        except Exception as error:  # told by updates()
            feed.error, feed.is_over = error, True
            feed.meter.end("failed")
        finally:
            self._pipeline.turn_queue.leave(feed.place)
            self._tell_reader()

    def _put(self, feed: _Feed, output: OmniOutput) -> None:
        feed.put(output)
        self._tell_reader()

    def _tell_reader(self) -> None:
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait_for_news(self) -> None:
        # An asyncio.Event takes several times as long, and this is waited for at every token.
        if not self._has_news:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._has_news = False

    def _failure(self, error: BaseException) -> ApiError:
        """The pipeline itself is over: it was closed, or its driver crashed."""
        if isinstance(error, ApiError):
            return error
        self._pipeline.fail(f"{type(error).__name__}: {error}")
        return ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"the model {self._pipeline.name!r} cannot go on: {error}",
            code="model_failed",
        )

    def _refusal(self, output: OmniOutput) -> ApiError:
        assert output.error is not None
        if output.refused:
            return ApiError.bad_request(
                output.error, param=self._prompt_param, code="invalid_prompt"
            )
        return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, output.error, code="request_failed")


def _recorded(error: ApiError) -> ApiError:
    error.is_recorded = True  # by the meter of its request
    return error


async def outputs_of_stage(
    pipeline: ServedPipeline, requests: Sequence[AskedRequest], prompt_param: str, stage: str
) -> AsyncIterator[tuple[int, StageOutput]]:
    """Run requests until one stage is done with all of them; what comes later is not waited for.

    Args:
        pipeline: which to run them on.
        requests: each with its id.
        prompt_param: what the client called the prompt.
        stage: whose outputs are wanted.

    Yields:
        A request's place among those given, and its newest output, up to the finished one.

    Raises:
        ApiError: see :class:`Feeds` and its ``updates``.
    """
    unfinished = set(range(len(requests)))
    async with Feeds(pipeline, requests, prompt_param) as feeds:
        async for update in feeds.updates():
            output = update.output.stages.get(stage)
            if output is None or update.index not in unfinished:
                continue
            yield update.index, output
            if output.finished:
                unfinished.discard(update.index)
            if not unfinished:
                return
