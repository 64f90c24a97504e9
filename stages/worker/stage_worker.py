"""Drives one stage: executes commands, makes prompts, steps, cuts chunks, emits events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import msgspec

from engine import CodecPrompt, Prompt, SpeechPrompt, TextChunk
from engine.interface.outputs import OutputDelta
from engine.interface.placed_error import described
from stages.stage import Prepared, Stage, StageRequest, Transform, TransformContext
from stages.stage_output import OutputAccumulator, StageOutput
from stages.trace_events import Traced
from stages.worker.guarded_stage import GuardedStage
from stages.worker.messages import (
    Abort,
    Ack,
    Chunk,
    Command,
    Credit,
    Enter,
    Event,
    Extend,
    Failed,
    Lift,
    Output,
    StreamedEdge,
    StreamPlace,
)
from stages.worker.preparations import Preparations, is_light
from stages.worker.request_state import ChunkCutter, RequestState
from stages.worker.stage_link import StageLink


def num_tensor_bytes(outputs: Iterable[StageOutput]) -> int:
    """Return the size of the outputs' tensors in bytes, without mapping shared memory."""
    of_each = [getattr(output.tensors, "entries", output.tensors) for output in outputs]
    return sum(tensor.nbytes for tensors in of_each for tensor in tensors.values())


class StageWorker(StageLink):
    """Owns a stage and the state of every request in it. ::

        Enter ──► transform ──► prepared ──► stage.step ──► Output: delta, chunks
        Extend ─► transform ──► pending ──► stage.extend_request ──► Ack

    A request whose chunks are not consumed as fast as they are produced is paused before its next
    step. An error of one request ends only that request, with an event that has the reason.

    Args:
        stage: an idle stage, which this worker owns from now on.
        transform: makes prompts of the outputs of the stage's sources; None for a root.
        edges: outgoing streamed edges of the stage.
    """

    def __init__(
        self, stage: Stage, transform: Transform | None, edges: Sequence[StreamedEdge] = ()
    ) -> None:
        stage.ownership.check()
        self.stage = stage
        self._transform = transform
        self._edges = tuple(edges)
        self._guarded = GuardedStage(stage)
        # Requests run in the order of arrival, regardless of how long their preparation takes.
        self._orders = count()
        self._states: dict[str, RequestState] = {}
        self._events: list[Event] = []
        self._preparations: Preparations[RequestState, Prepared] | None = None
        self._on_event: Callable[[], object] = lambda: None
        self._has_moved = False
        # The stage's step counter at the last check_idle().
        self._num_steps = -1

    def notify(self, on_event: Callable[[], object]) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        self._on_event = on_event

    def prepare_aside(self) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        self._preparations = Preparations(self._on_event)
        self._guarded.threads.own_thread()

    @property
    def has_work(self) -> bool:
        """True if a turn would do anything: not while all requests are only being prepared."""
        return bool(self._events or self._guarded.inside) or self._has_prepared

    @property
    def _has_prepared(self) -> bool:
        is_idle = not self._guarded.inside
        return self._preparations is not None and self._preparations.has_ready(is_idle=is_idle)

    def check_idle(self) -> bool:
        """Return True if nothing has changed since the last call."""
        if self._has_moved:
            self._has_moved, self._num_steps = False, -1
            return False
        before, self._num_steps = self._num_steps, self.stage.stats().num_steps
        return self._num_steps == before

    def close(self) -> None:
        """Wait for the threads that prepare requests, if there are any."""
        if self._preparations is not None:
            self._preparations.close()

    def events(self) -> Sequence[Event | Traced]:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        events, self._events = self._events, []
        return events

    def send(self, command: Command) -> None:
        """Execute a command immediately."""
        self._has_moved = True
        if isinstance(command, Enter):
            self._enter(command)
            return
        state = self._states.get(command.request_id)
        if state is None:  # it ended here before the sender was notified
            return
        match command:
            case Extend():
                self._extend(state, command)
            case Credit():
                cutter = state.cutters[command.consumer]
                cutter.place = cutter.place.answered(command)
                if state.is_paused and not state.is_held_up:
                    self._guarded.resume(state)
            case Lift():
                if state.is_paused:
                    self._guarded.resume(state)
            case Abort():
                self._drop(state)

    def work(self) -> None:
        """Admit prepared requests, run one step of the stage, and deliver chunks it waits for."""
        self._admit_prepared()
        inside = self._guarded.inside
        if not inside:
            return
        self._pause_full()
        deltas, lost = self._guarded.step()
        for delta in deltas:
            if (state := inside.get(delta.request_id)) is not None:
                self._emit(state, delta)
        if not lost and inside and not self.stage.has_unfinished_requests:
            message = "it lost the request: it has no work left, but never put it out"
            lost = dict.fromkeys(inside, message)
        for request_id, failure in lost.items():
            error = ValueError(f"stage {self.stage.name!r}: {failure}")
            self._fail(inside[request_id], error, is_stages=True)
        if lost and not inside:
            self._guarded.recover()
        for state in [state for state in inside.values() if state.pending]:
            self._deliver(state)
        self._has_moved |= bool(deltas or self._events)

    def repair(self) -> str | None:
        """Rebuild the stage if it is broken and has no requests; return why it is unusable."""
        return self._guarded.repair()

    def drop_all(self) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        self._states, self._events = {}, []
        if self._preparations is not None:
            self._preparations.clear()
        self._guarded.drop_all()

    def _enter(self, enter: Enter) -> None:
        cutters = {
            edge.consumer: ChunkCutter(
                self.stage, edge, enter.streams.get(edge.consumer, StreamPlace())
            )
            for edge in self._edges
        }
        is_streamed = self.stage.inputs is not None and self.stage.inputs.chunk_size is not None
        # Tensors of a long request are large: keep no reference to the sources.
        kept = msgspec.structs.replace(enter, sources=())
        state = RequestState(enter.request_id, kept, cutters, is_streamed=is_streamed)
        if cutters or not self.stage.final_output:
            state.so_far = OutputAccumulator(enter.request_id, self.stage.name)
        self._states[enter.request_id] = state
        if enter.sources:
            self.stage.note_transfer(num_tensor_bytes(enter.sources))
        try:
            prompt = self._prompt(state, enter.sources, enter.first_row)
            state.request = StageRequest(
                request_id=enter.request_id,
                prompt=prompt,
                sampling=enter.sampling,
                priority=enter.priority,
                cache_salt=enter.cache_salt,
                order=next(self._orders),
            )
            if is_streamed:
                self._events.append(Ack(enter.ticket))
            # In stages with sources, requests of negligible preparation time enter immediately.
            light, is_root = is_light(prompt), self._transform is None
            if self._preparations is None or (light and not is_root):
                self._guarded.add(state, self._guarded.prepare(state))
            else:
                prepare = partial(self._guarded.prepare, state)
                self._preparations.submit(state, prepare, light=light)
        except ValueError as error:
            self._refuse(state, error)

    def _admit_prepared(self) -> None:
        if self._preparations is None or not self._has_prepared:
            return
        for state, done in self._preparations.take():
            try:
                error = done.exception()
                if error is not None and not isinstance(error, ValueError):
                    raise ValueError(f"its preparation was ended by {described(error)}") from error
                self._guarded.add(state, done.result())
                self._deliver(state)
            except ValueError as error:
                self._refuse(state, error)

    def _extend(self, state: RequestState, extend: Extend) -> None:
        self.stage.note_transfer(num_tensor_bytes((extend.source,)))
        try:
            state.pending.append(self._prompt(state, (extend.source,), extend.first_row))
        except ValueError as error:
            self._fail(state, error)
        else:
            self._deliver(state)

    def _deliver(self, state: RequestState) -> None:
        """Pass the stage the chunks that it can use now."""
        try:
            while state.pending and state.is_inside:
                with self._guarded.blamed(state.request_id):
                    if not self.stage.needs_input(state.request_id):
                        break
                    self.stage.extend_request(state.request_id, state.pending.popleft())
                self._events.append(Ack(state.enter.ticket))
        except ValueError as error:
            self._fail(state, error)

    def _prompt(
        self, state: RequestState, sources: Sequence[StageOutput], first_row: int
    ) -> Prompt:
        """Return a request's prompt: the user's own, or the result of the stage's transform.

        Raises:
            ValueError: the transform failed, returned no prompt, or a prompt that never ends.
        """
        enter = state.enter
        is_last = all(source.finished for source in sources)
        with self._guarded.blamed(enter.request_id):
            prompt = enter.prompt
            if self._transform is not None:
                context = TransformContext(
                    enter.request_id,
                    enter.prompt,
                    tuple(sources),
                    speaker=enter.speaker,
                    first_row=first_row,
                    is_last=is_last,
                )
                made: object = self._transform(context)  # user code may return anything
                if not isinstance(made, Prompt):
                    kind = type(made).__name__
                    raise ValueError(f"its transform returned a {kind}, not a prompt")
                prompt = made
            # A stage would wait for more input, which never comes.
            streamed = CodecPrompt | SpeechPrompt | TextChunk
            if is_last and isinstance(prompt, streamed) and not prompt.is_last:
                raise ValueError(
                    f"it got a {type(prompt).__name__} with is_last=False, but nothing follows; a "
                    "transform hands on the is_last of its context"
                )
        return prompt

    def _pause_full(self) -> None:
        """Pause requests that have produced a chunk while the next stage has no room for more."""
        for state in list(self._guarded.inside.values()):
            # Only after a cut: a resumed request runs until it has produced a chunk.
            if not state.has_cut:
                continue
            state.has_cut = False
            if state.is_held_up:
                try:
                    with self._guarded.blamed(state.request_id):
                        self.stage.pause_request(state.request_id)
                    state.is_paused = True
                except ValueError as error:
                    self._fail(state, error)

    def _emit(self, state: RequestState, delta: OutputDelta) -> None:
        """Emit the new output of a request, with the chunks that are due."""
        ticket, is_shown, so_far = state.enter.ticket, self.stage.final_output, state.so_far
        if delta.finished:
            self._guarded.leave(state, has_failed=delta.failure is not None)
            del self._states[state.request_id]
        chunks: tuple[Chunk, ...] = ()
        if so_far is not None:
            try:
                with self._guarded.blamed(state.request_id):
                    so_far.add(delta)
                    cut = [cutter.cut(delta, so_far) for cutter in state.cutters.values()]
            except ValueError as error:
                if is_shown:
                    self._events.append(Output(ticket, replace(delta, finished=False)))
                self._fail(state, error)
                return
            chunks = tuple(chunk for chunk in cut if chunk is not None)
            state.has_cut |= bool(chunks)
        emitted: OutputDelta | None = delta
        if not is_shown:
            assert so_far is not None
            emitted = so_far.as_delta() if delta.finished else None
        if emitted is None and not chunks:
            return
        if emitted is not None and emitted.tensors and not state.enter.wants_tensors:
            emitted = replace(emitted, tensors={})
        state.has_emitted = True
        self._events.append(Output(ticket, emitted, chunks))

    def _refuse(self, state: RequestState, error: ValueError) -> None:
        """Report that a request could not start here."""
        self._drop(state)
        # A plain ValueError means that the request is at fault, so that its sender can fix it. One
        # that wraps another kind of exception is an error of the stage itself.
        is_request_error = isinstance(error.__cause__, ValueError | None)
        failed = Failed(state.enter.ticket, str(error), has_begun=False, refused=is_request_error)
        self._events.append(failed)

    def _fail(self, state: RequestState, error: ValueError, *, is_stages: bool = False) -> None:
        self._drop(state)
        self._events.append(Failed(state.enter.ticket, str(error), is_stages=is_stages))

    def _drop(self, state: RequestState) -> None:
        self._guarded.drop(state)
        if self._preparations is not None:
            self._preparations.drop(state)
        if self._states.get(state.request_id) is state:
            del self._states[state.request_id]
