"""Drives one stage: takes commands, makes prompts, steps, cuts chunks, emits events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from engine import CodecPrompt, Prompt, SamplingParams, SpeechPrompt
from engine.interface.deferred import with_fields
from engine.interface.placed_error import described
from engine.interface.sampling_params import RequestSeeds
from stages.stage import Prepared, Stage, StageOutput, StageRequest, Transform, TransformContext
from stages.worker.chunk_cutter import ChunkCutter
from stages.worker.guarded_stage import GuardedStage
from stages.worker.messages import (
    Abort,
    CloseStream,
    Command,
    Credit,
    Enter,
    Event,
    Extend,
    Failed,
    Lift,
    Moved,
    StreamedEdge,
    StreamPlace,
    Took,
)
from stages.worker.preparations import Preparations, is_light
from stages.worker.stage_link import StageLink
from stages.worker.stay import Stay

__all__ = ["StageWorker", "num_tensor_bytes"]


def num_tensor_bytes(outputs: Iterable[StageOutput]) -> int:
    """Bytes of the outputs' tensors, without looking into those that lie in shared memory."""
    return sum(_num_bytes(output) for output in outputs)


def _num_bytes(output: StageOutput) -> int:
    tensors = output.tensors
    told = getattr(tensors, "nbytes", None)
    return told if isinstance(told, int) else sum(each.nbytes for each in tensors.values())


class StageWorker(StageLink):
    """Owns a stage and every request's stay in it. ::

        Enter ──► transform ──► made ready ──► stage.step ──► Moved: output, chunks
        Extend ─► transform ──► pending ──► stage.extend_request ──► Took

    A request whose chunks are not taken as fast as they come rests in the stage, before its next
    step. Whatever goes wrong with one request ends that request alone, and is told of it.

    Args:
        stage: idle; this worker's from now on.
        transform: makes prompts of what the stage's sources put out; None for a root.
        edges: the streamed edges that leave the stage.
    """

    def __init__(
        self, stage: Stage, transform: Transform | None, edges: Sequence[StreamedEdge] = ()
    ) -> None:
        stage.ownership.check()
        self.stage = stage
        self._transform = transform
        self._edges = tuple(edges)
        self._guarded = GuardedStage(stage)
        # However long requests are prepared, they run in the order in which they came, with the
        # same seeds in every run.
        self._orders = count()
        self._seeds: RequestSeeds | None = None
        self._stays: dict[str, Stay] = {}
        self._news: list[Event] = []
        self._preparations: Preparations[Stay, Prepared] | None = None
        self._on_news: Callable[[], object] | None = None
        self._has_moved = False
        # Counted by the stage when it was last asked whether it is idle.
        self._num_steps = -1

    def tell_news(self, on_news: Callable[[], object]) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        self._on_news = on_news

    def prepare_aside(self) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        self._preparations = Preparations(self._on_news)
        self._guarded.own_thread()

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything: not while all requests are only being prepared."""
        has_ready = self._preparations is not None and self._preparations.has_ready
        return bool(self._news or self._guarded.inside) or has_ready

    def check_idle(self) -> bool:
        """Whether nothing has moved since this was asked before."""
        if self._has_moved:
            self._has_moved, self._num_steps = False, -1
            return False
        before, self._num_steps = self._num_steps, self.stage.stats().num_steps
        return self._num_steps == before

    @property
    def time_to_work(self) -> float | None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        return None if self._preparations is None else self._preparations.time_to_ready

    def close(self) -> None:
        """Wait for the threads that prepare requests, if there are any."""
        if self._preparations is not None:
            self._preparations.close()

    def news(self) -> list[Event]:
        """What happened since this was last called."""
        news, self._news = self._news, []
        return news

    def send(self, command: Command) -> None:
        """Do what is commanded, at once."""
        self._has_moved = True
        if isinstance(command, Enter):
            self._enter(command)
            return
        stay = self._stays.get(command.request_id)
        if stay is None:  # it has ended here before its sender heard of that
            return
        match command:
            case Extend():
                self._extend(stay, command)
            case Credit():
                cutter = stay.cutters[command.consumer]
                cutter.outstanding = max(0, cutter.outstanding - 1)
                self._resume_if_drained(stay)
            case CloseStream():
                stay.cutters[command.consumer].is_open = False
                self._resume_if_drained(stay)
            case Lift():
                if stay.is_paused:
                    self._guarded.resume(stay)
            case Abort():
                self._drop(stay)

    def work(self) -> None:
        """Let in what has been prepared; one step of the stage; hand it the chunks it waits for."""
        self._admit_prepared()
        inside = self._guarded.inside
        if not inside:
            return
        self._let_rest()
        outputs, lost = self._guarded.step()
        for output in outputs:
            if (stay := inside.get(output.request_id)) is not None:
                self._tell(stay, output)
        if not lost and inside and not self.stage.has_unfinished_requests:
            message = "it lost the request: it has no work left, but never put it out"
            lost = dict.fromkeys(inside, message)
        for request_id, failure in lost.items():
            error = ValueError(f"stage {self.stage.name!r}: {failure}")
            self._fail(inside[request_id], error, is_stages=True)
        if lost and not inside:
            self._guarded.recover()
        for stay in [stay for stay in inside.values() if stay.pending]:
            self._deliver(stay)
        self._has_moved |= bool(self._news)

    def mend(self) -> str | None:
        """Rebuild the stage if it is broken and has no requests; why it cannot be used, if so."""
        return self._guarded.mend()

    def drop_all(self) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        self._stays, self._news = {}, []
        if self._preparations is not None:
            self._preparations.clear()
        self._guarded.drop_all()

    def _enter(self, enter: Enter) -> None:
        cutters = {
            edge.consumer: ChunkCutter.at(
                self.stage, edge, enter.streams.get(edge.consumer, StreamPlace())
            )
            for edge in self._edges
        }
        is_streamed = self.stage.inputs is not None and self.stage.inputs.chunk_size is not None
        # Tensors of a long request are large: the stage keeps what its prompt is made of, no more.
        stay = Stay(replace(enter, sources=()), cutters, is_streamed=is_streamed)
        self._stays[enter.request_id] = stay
        if enter.sources:
            self.stage.note_transfer(num_tensor_bytes(enter.sources))
        try:
            prompt = self._prompt(stay, enter.sources, enter.first_row)
            stay.request = StageRequest(
                request_id=enter.request_id,
                prompt=prompt,
                sampling=self._seeded(enter.sampling),
                priority=enter.priority,
                cache_salt=enter.cache_salt,
                order=next(self._orders),
            )
            if is_streamed:
                self._news.append(Took(enter.ticket))
            # Behind other stages, what takes no time worth speaking of enters at once.
            light, group = is_light(prompt), enter.group
            if self._preparations is None or (group is None and light):
                self._guarded.add(stay, self._guarded.prepare(stay))
            else:
                prepare = partial(self._guarded.prepare, stay)
                self._preparations.submit(stay, prepare, group=group, light=light)
        except ValueError as error:
            self._refuse(stay, error)

    def _seeded(self, params: SamplingParams | None) -> SamplingParams | None:
        """A request's parameters, or the stage's own, with a seed if tokens are drawn for it."""
        given = params or self.stage.sampling
        if given is None or given.seed is not None or self.stage.sampling is None:
            return params
        if self._seeds is None:
            self._seeds = RequestSeeds(self.stage.seed)
        seeded = self._seeds.seeded(given)
        return params if seeded is given else seeded

    def _admit_prepared(self) -> None:
        for stay, done in [] if self._preparations is None else self._preparations.take():
            try:
                error = done.exception()
                if error is not None and not isinstance(error, ValueError):
                    raise ValueError(f"its preparation was ended by {described(error)}") from error
                self._guarded.add(stay, done.result())
                self._deliver(stay)
            except ValueError as error:
                self._refuse(stay, error)

    def _extend(self, stay: Stay, extend: Extend) -> None:
        self.stage.note_transfer(num_tensor_bytes((extend.source,)))
        try:
            stay.pending.append(self._prompt(stay, (extend.source,), extend.first_row))
        except ValueError as error:
            self._fail(stay, error)
        else:
            self._deliver(stay)

    def _deliver(self, stay: Stay) -> None:
        """Hand the stage the chunks that it can use now."""
        try:
            while stay.pending and stay.is_inside:
                with self._guarded.blamed(stay.request_id):
                    if not self.stage.needs_input(stay.request_id):
                        break
                    self.stage.extend_request(stay.request_id, stay.pending.popleft())
                self._news.append(Took(stay.enter.ticket))
        except ValueError as error:
            self._fail(stay, error)

    def _prompt(self, stay: Stay, sources: Sequence[StageOutput], first_row: int) -> Prompt:
        """A request's prompt: the user's own, or what the stage's transform makes.

        Raises:
            ValueError: the transform failed, or made what is no prompt or would never end.
        """
        enter = stay.enter
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
                made: object = self._transform(context)  # a user's code may return anything
                if not isinstance(made, Prompt):
                    kind = type(made).__name__
                    raise ValueError(f"its transform returned a {kind}, not a prompt")
                prompt = made
            # A stage would wait for more, which never comes.
            if is_last and isinstance(prompt, CodecPrompt | SpeechPrompt) and not prompt.is_last:
                raise ValueError(
                    f"it got a {type(prompt).__name__} with is_last=False, but nothing follows; a "
                    "transform hands on the is_last of its context"
                )
        return prompt

    def _let_rest(self) -> None:
        """Pause the requests that have made a chunk for which the next stage has no room."""
        for stay in list(self._guarded.inside.values()):
            # Only after a cut: a request whose pause was lifted goes on until it has made a chunk.
            if not stay.has_cut:
                continue
            stay.has_cut = False
            if stay.is_held_up:
                try:
                    with self._guarded.blamed(stay.request_id):
                        self.stage.pause_request(stay.request_id)
                    stay.is_paused = True
                except ValueError as error:
                    self._fail(stay, error)

    def _resume_if_drained(self, stay: Stay) -> None:
        if stay.is_paused and not stay.is_held_up:
            self._guarded.resume(stay)

    def _tell(self, stay: Stay, output: StageOutput) -> None:
        """Tell what the stage put out, with the chunks that are due."""
        stay.was_told_of |= bool(self.stage.final_output)
        if output.finished:
            self._guarded.leave(stay, has_failed=output.failure is not None)
            del self._stays[stay.request_id]
        try:
            with self._guarded.blamed(stay.request_id):
                cut = [cutter.cut(output) for cutter in stay.cutters.values()]
        except ValueError as error:
            # What it made so far is told, and that nothing follows.
            self._news.append(Moved(stay.enter.ticket, with_fields(output, finished=False)))
            self._fail(stay, error)
            return
        if output.finished and not stay.enter.wants_tensors:
            output = with_fields(output, tensors={})
        chunks = tuple(chunk for chunk in cut if chunk is not None)
        if chunks:
            stay.has_cut = stay.was_told_of = True
        self._news.append(Moved(stay.enter.ticket, output, chunks))

    def _refuse(self, stay: Stay, error: ValueError) -> None:
        """Tell that a request could not begin here."""
        self._drop(stay)
        # Whether the request was at fault, so that its sender can mend it. A ValueError that wraps
        # another kind of exception is a mistake of the stage itself.
        is_askers = isinstance(error.__cause__, ValueError | None)
        failed = Failed(stay.enter.ticket, str(error), has_begun=False, refused=is_askers)
        self._news.append(failed)

    def _fail(self, stay: Stay, error: ValueError, *, is_stages: bool = False) -> None:
        self._drop(stay)
        self._news.append(Failed(stay.enter.ticket, str(error), is_stages=is_stages))

    def _drop(self, stay: Stay) -> None:
        self._guarded.drop(stay)
        if self._preparations is not None:
            self._preparations.drop(stay)
        if self._stays.get(stay.request_id) is stay:
            del self._stays[stay.request_id]
