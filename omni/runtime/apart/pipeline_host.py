"""What the process of a pipeline runs."""

from __future__ import annotations

import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from engine.interface.log_fields import LogFields, package_logger
from engine.interface.placed_error import described
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniOutput
from omni.runtime.apart.apart_messages import (
    AbortById,
    ApartSpec,
    Discard,
    ShownOutput,
    Submit,
    apart_codec,
)
from omni.runtime.apart.shown_outputs import OutputShortener, ShortOutput, packed
from omni.runtime.driver import Driver
from omni.runtime.orchestrator import Orchestrator
from omni.runtime.runner import Ticket
from stages import Stage
from stages.remote.channel import Channel, ChannelClosed
from stages.remote.control import Beat, Built, Call, GaveUp, Returned
from stages.remote.segments import SegmentPool
from stages.remote.worker_log import forward_log
from stages.remote.worker_main import WorkerCalls, alive, build_stage, facts_of, not_built

__all__ = ["PipelineHost", "build_stages", "host_main"]

_logger = package_logger(__name__)

_BEAT_S = 0.5
_EXIT_PATIENCE_S = 5.0


def host_main(sock: socket.socket, argument: bytes) -> None:
    """Run a pipeline until its user closes it, or is gone.

    Args:
        sock: to the user.
        argument: the :class:`~omni.runtime.apart.apart_messages.ApartSpec`.
    """
    codec = apart_codec()
    spec: ApartSpec = codec.decode(argument)
    channel = Channel(sock, codec, SegmentPool(), "the program")
    host = PipelineHost(spec, channel.send, build_stages)
    channel.start(host.take, lambda reason: host.end())
    forward_log(channel.send, spec.log_level, LogFields())
    try:
        host.run()
        channel.wait_until_sent(_EXIT_PATIENCE_S)
    except ChannelClosed:
        return
    finally:
        channel.close()


def build_stages(spec: ApartSpec) -> Pipeline:
    """Build the pipeline, of stages in this process.

    Raises:
        ValueError: a stage cannot be built.
    """
    with ExitStack() as unless_built:
        stages: list[Stage] = []
        for each in spec.stages:
            try:
                stage, _ = build_stage(each)
            except ValueError as error:
                raise ValueError(f"{each.called}: {error}") from error
            unless_built.callback(stage.close)
            stages.append(stage)
        pipeline = Pipeline(stages, speaker=spec.speaker, voices=spec.voices)
        unless_built.pop_all()
    return pipeline


class PipelineHost:
    """Runs the requests of a pipeline's user in another process. ::

        channel's thread ──► take(): requests to the driver, questions that only look answered
                    └──► what changes stages: driver's thread, between its turns
        driver's thread ──► outputs of a turn, in one message
        main thread ──► signs of life

    Args:
        spec: what to build.
        send: to the user; from any thread. It raises ``ConnectionError`` when nobody listens.
        build: builds it.
    """

    def __init__(
        self,
        spec: ApartSpec,
        send: Callable[[object], None],
        build: Callable[[ApartSpec], Pipeline],
    ) -> None:
        self._spec, self._send, self._build = spec, send, build
        self._pipeline: Pipeline | None = None
        self._orchestrator: Orchestrator | None = None
        self._driver: Driver | None = None
        self._calls: Mapping[str, WorkerCalls] = {}
        self._ends: queue.SimpleQueue[GaveUp | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # over the next one
        self._tickets: dict[int, Ticket | None] = {}
        # Of the driver's thread.
        self._shortener = OutputShortener()
        self._untold: list[ShortOutput] = []
        self._gone: deque[int] = deque()  # filled by another one
        self._num_turns = 0
        self._has_given_up = False

    def run(self) -> None:
        """Build the pipeline, and run what comes until the end."""
        try:
            with alive(self._send):
                pipeline = self._pipeline = self._build(self._spec)
            facts = {name: facts_of(stage) for name, stage in pipeline.stages.items()}
        except Exception as error:  # told once, to whoever asked for the pipeline
            self._send(not_built(self._spec, error))
            return
        self._calls = {name: WorkerCalls(stage) for name, stage in pipeline.stages.items()}
        orchestrator = self._orchestrator = Orchestrator(pipeline)
        driver = self._driver = Driver(orchestrator, self._end_turn)
        try:
            self._send(Built(facts))
            self._watch(driver)
        finally:
            driver.stop()
            pipeline.close()

    def take(self, message: object) -> None:
        """Take what the user says, in the channel's thread."""
        match message:
            case Submit():
                self._submit(message)
            case Discard():
                with self._lock:
                    tickets = [self._tickets.pop(each, None) for each in message.numbers]
                self._running.discard(each for each in tickets if each is not None)
                self._gone += message.numbers
            case AbortById():
                self._running.abort(message.request_id)
            case Call(method="stats"):
                self._send(Returned(message.number, self._stats()))
            case Call():
                name, method = _asked(message)
                if method in self._calls[name].at_once:
                    self._answer(message)
                else:
                    self._running.between_turns(lambda: self._answer(message))

    def end(self) -> None:
        """Have :meth:`run` return soon."""
        self._ends.put(None)

    @property
    def _running(self) -> Driver:
        assert self._driver is not None, "the pipeline is built before anything is asked of it"
        return self._driver

    def _watch(self, driver: Driver) -> None:
        """Wait for the end, and give signs of life while there is any."""
        num_turns = -1
        while True:
            try:
                end = self._ends.get(timeout=_BEAT_S)
            except queue.Empty:
                # A step that hangs is none.
                if num_turns != self._num_turns or not driver.is_busy:
                    num_turns = self._num_turns
                    self._send(Beat(self._stats()))
                if (crash := driver.crash) is not None:
                    self._give_up(f"its driver crashed by {type(crash).__name__}: {crash}")
                continue
            if end is not None:  # another process can do what this one cannot
                self._send(end)
            return

    def _answer(self, call: Call) -> None:
        name, method = _asked(call)
        answer = self._calls[name].answer(Call(call.number, method, call.arguments))
        with suppress(ConnectionError):  # then nobody waits for it
            self._send(answer)

    def _stats(self) -> Mapping[str, Any]:
        assert self._pipeline is not None
        return {name: stage.stats() for name, stage in self._pipeline.stages.items()}

    def _submit(self, message: Submit) -> None:
        with self._running.together():
            for each in message.submissions:
                name = each.request.request_id or ""
                tell = partial(self._tell, each.number)
                with self._lock:
                    self._tickets[each.number] = None
                ticket = self._running.submit(each.request, name, tell)
                with self._lock:
                    if each.number in self._tickets:  # else it has ended
                        self._tickets[each.number] = ticket

    def _tell(self, number: int, output: OmniOutput | BaseException) -> None:
        """A sink: what a turn has to tell goes together."""
        if isinstance(output, BaseException):
            self._give_up(f"its driver crashed by {type(output).__name__}: {output}")
            return
        if output.finished:
            with self._lock:
                self._tickets.pop(number, None)
        self._untold.append(self._shortener.shorten(number, output))

    def _end_turn(self) -> None:
        try:
            self._tell_turn()
        except Exception as error:  # some outputs may be lost
            self._give_up(f"it could not hand on its outputs: {described(error)}")

    def _tell_turn(self) -> None:
        self._num_turns += 1
        if self._has_given_up:  # whoever is still waiting is told why by the user's side
            return
        if self._untold:
            untold, self._untold = self._untold, []
            self._tell_all(untold)
        while self._gone:
            self._shortener.forget(self._gone.popleft())
        assert self._orchestrator is not None
        if (why := self._orchestrator.mend()) is not None:
            self._give_up(why)

    def _give_up(self, reason: str) -> None:
        self._has_given_up = True
        self._ends.put(GaveUp(reason))

    def _tell_all(self, outputs: Sequence[ShortOutput]) -> None:
        try:
            self._send(packed(outputs))
        except ConnectionError:  # the process is about to end
            return
        except (MemoryError, ValueError) as error:
            # Something does not fit into shared memory, or is no type that can be sent.
            if len(outputs) > 1:
                for each in outputs:
                    self._tell_all((each,))
                return
            _logger.exception("an output of pipeline %r cannot be handed on", self._spec.name)
            ((shown, _),) = outputs
            told = f"its output cannot be handed on: {type(error).__name__}: {error}"
            self._drop(shown.number)
            self._send(packed([(ShownOutput(shown.number, {}, True, told), ())]))

    def _drop(self, number: int) -> None:
        self._shortener.forget(number)
        with self._lock:
            ticket = self._tickets.pop(number, None)
        if ticket is not None:
            self._running.discard([ticket])


def _asked(call: Call) -> tuple[str, str]:
    """The stage and the method of a call, which are told with a dot between them."""
    name, _, method = call.method.rpartition(".")
    return name, method
