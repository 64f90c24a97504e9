"""A stage whose workers run in other processes and may die, and the link to it.

Among several replicas, a request goes to the one that most likely has its prefix cached. Each
request keeps everything needed to run again in another worker, including its seed.
"""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from hashlib import blake2b
from itertools import count
from operator import lt
from typing import TYPE_CHECKING, Any

import msgspec

from engine import (
    ChatPrompt,
    ExplicitEncoderDecoderPrompt,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from engine.interface.outputs import OutputDelta
from stages.remote.messages import Built, Commands, Idle, NotBuilt
from stages.remote.shared_memory import SharedTensors
from stages.remote.supervisor import WorkerSupervisor
from stages.stage import Stage, StageRequest, StageStats
from stages.stage_config import StageConfig
from stages.stage_output import OutputAccumulator, StageOutput, delta_since
from stages.trace_events import RUN_AGAIN, StageEvent, Traced, this_clock
from stages.worker.messages import (
    Abort,
    Ack,
    Command,
    Credit,
    Enter,
    Event,
    Extend,
    Failed,
    Output,
    StreamedEdge,
    StreamPlace,
)
from stages.worker.stage_link import StageLink, WorkerState, why_lost

if TYPE_CHECKING:
    import torch

MAX_AHEAD = 4
"""Maximum excess of requests over the least loaded replica that is accepted for a prefix hit."""

_PIECE_BYTES = 64
_MAX_PIECES = 512
_MAX_KNOWN = 2**16


class PrefixRouter:
    """Remembers which replica has seen which prompt prefixes. ::

        prompt    | piece | piece | piece | piece |        hash 1 covers piece 1, hash 2 pieces 1-2
        replica       0       0       1                    goes to 1, if 1 is not overloaded

    The choice never affects the output, only how much is recomputed. The replica with the longest
    known prefix gets the request, unless it has over :data:`MAX_AHEAD` requests more than the
    least loaded one. Without a known prefix the least loaded replica gets it, round-robin among
    equals.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._turn = 0

    def choose(self, enter: Enter, loads: Mapping[int, int]) -> int:
        """Choose a replica, given the number of requests of each, and remember the choice."""
        if len(loads) == 1:
            return next(iter(loads))
        hashes = _prefix_hashes(enter)
        fewest = min(loads.values())
        free = [each for each, load in loads.items() if load <= fewest + MAX_AHEAD]
        holders = (self._known.get(each) for each in reversed(hashes))
        chosen = next((each for each in holders if each in free), None)
        if chosen is None:
            self._turn += 1
            chosen = min(loads, key=lambda each: (loads[each], (each - self._turn) % len(loads)))
        for each in hashes:
            self._known[each] = chosen
            self._known.move_to_end(each)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return chosen

    def forget(self, replica: int) -> None:
        """Forget the prefixes of a replica that has lost its cache."""
        for each in [each for each, holder in self._known.items() if holder == replica]:
            del self._known[each]


def _prefix_hashes(enter: Enter) -> list[bytes]:
    """Hash every prefix of a prompt, shortest first; no hashes if it has no text."""
    content = _content(enter.prompt)
    # Requests with different salts share nothing.
    chain = blake2b((enter.cache_salt or "").encode(), digest_size=16)
    hashes = []
    for start in range(0, min(len(content), _PIECE_BYTES * _MAX_PIECES), _PIECE_BYTES):
        chain.update(content[start : start + _PIECE_BYTES])
        hashes.append(chain.digest())
    return hashes


def _content(prompt: object) -> bytes:
    match prompt:
        case str():
            return prompt.encode(errors="replace")
        case TextPrompt():
            return _content(prompt.prompt)
        case TokensPrompt():
            return array("q", prompt.prompt_token_ids).tobytes()
        case ChatPrompt():
            return json.dumps((prompt.tools, prompt.messages), default=str).encode()
        case ExplicitEncoderDecoderPrompt():
            return _content(prompt.encoder_prompt)
        case _:
            return b""


@dataclass(slots=True, eq=False)
class Attempt:
    """One request in a stage, across all the workers that successively run it. ::

        first run    a b c d ✗            the worker died; a b c were emitted, c in a chunk
        second run           a b c | d e  repeated outputs are dropped, chunks continue after c

    A second run emits the same, since the output depends only on prompt, parameters and seed.

    Attributes:
        enter: the command from the orchestrator.
        ticket: the worker's ticket of the current run.
        emitted: output that was passed to the orchestrator, without its audio.
        places: progress of its streamed edges, by consumer.
        num_samples: audio samples that were passed to the orchestrator.
        again: output of the current run while it only repeats earlier output; else None.
        num_acks: consumed chunks that were reported to the orchestrator.
        num_acks_again: chunks that the current run has consumed.
        num_runs: number of runs that were started.
        replica: the worker that has it, or gets it once it is up.
    """

    enter: Enter
    ticket: int
    emitted: OutputAccumulator
    extends: list[Extend] = field(default_factory=list)
    places: dict[str, StreamPlace] = field(default_factory=dict)
    num_samples: int = 0
    again: OutputAccumulator | None = None
    num_acks: int = 0
    num_acks_again: int = 0
    num_runs: int = 1
    replica: int = 0
    is_sent: bool = False

    def begin_again(self, ticket: int) -> None:
        """Start another run, in a worker without state of this request."""
        self.ticket = ticket
        self.again = OutputAccumulator(self.enter.request_id, self.emitted.stage)
        self.num_acks_again = 0
        self.num_runs += 1
        self.is_sent = False

    def entry(self) -> Enter:
        """Return the command that starts the current run."""
        return msgspec.structs.replace(self.enter, ticket=self.ticket, streams=dict(self.places))

    def take(self) -> bool:
        """Count a chunk that the current run has consumed; return True if no run did before."""
        self.num_acks_again += 1
        if self.num_acks_again <= self.num_acks:
            return False
        self.num_acks = self.num_acks_again
        return True

    def new_in(self, event: Output) -> Output | None:
        """Return the new part of an output of the current run; None if nothing is new.

        Raises:
            ValueError: it contradicts what the previous run emitted.
        """
        for chunk in event.chunks:
            num_tokens, num_rows = len(chunk.output.token_ids), _num_rows(chunk.output.tensors)
            place = self.places[chunk.consumer]
            self.places[chunk.consumer] = place.after(num_tokens, num_rows)
        delta = event.delta
        if delta is not None and self.again is not None:
            delta = self._new_of_rerun(self.again, delta)
        if delta is None and not event.chunks:
            return None
        if delta is not None and not delta.finished:
            if delta.audio is not None:
                self.num_samples += delta.audio.samples.shape[0]
            self.emitted.add(delta if delta.audio is None else replace(delta, audio=None))
        return Output(self.enter.ticket, delta, event.chunks)

    def _new_of_rerun(self, again: OutputAccumulator, delta: OutputDelta) -> OutputDelta | None:
        """Return the new part of a delta of a run that repeats what the previous run emitted."""
        if delta.failure is not None:
            return replace(delta, text=None, token_ids=(), logprobs=None, others=(), audio=None)
        again.add(delta)
        now, before = again.output(), self.emitted.output()
        sound = again.sound_from(self.num_samples)
        lengths, had = _lengths(now), _lengths(before)
        is_behind = any(map(lt, lengths, had))
        if not delta.finished and (is_behind or (lengths == had and sound is None)):
            return None
        self.again = None
        return replace(delta_since(now, before), audio=sound, whole_audio=delta.whole_audio)


def _lengths(output: StageOutput) -> list[int]:
    """Return the text length of each completion, then the number of tokens of each."""
    texts = [output.text or "", *(each.text for each in output.completions[1:])]
    ids = [output.token_ids, *(each.token_ids for each in output.completions[1:])]
    return [*map(len, texts), *map(len, ids)]


def _num_rows(tensors: Mapping[str, object]) -> int:
    """Return the number of rows of the longest tensor, without mapping any."""
    entries = tensors.entries if isinstance(tensors, SharedTensors) else tensors
    shapes = [entry.shape for entry in entries.values()]  # type: ignore[attr-defined]
    return max((shape[0] for shape in shapes), default=0)


_logger = logging.getLogger(f"omni.{__name__}")


class RemoteLink(StageLink):
    """Sends commands to a stage's workers, and hides their deaths from the orchestrator.

    What a request needs to run again is kept until the stage is done with it. A worker that ends
    is restarted; its requests run again there, or in another replica, from their original inputs,
    at most ``max_retries`` times. The same holds for requests that the stage itself ended with an
    error. Nothing is emitted twice.

    Args:
        edges: outgoing streamed edges of the stage.
        max_retries: maximum number of retries of a request.
    """

    def __init__(
        self,
        name: str,
        supervisors: Sequence[WorkerSupervisor],
        edges: tuple[StreamedEdge, ...],
        max_retries: int,
    ) -> None:
        self._name = name
        self._supervisors = tuple(supervisors)
        self._inboxes = [supervisor.inboxes[name] for supervisor in supervisors]
        # Workers whose messages were read last; commands are for them, and for no later ones. The
        # first ones have built the stage before anyone reads.
        self._generations = [1] * len(self._supervisors)
        self._edges = edges
        self._max_retries = max_retries
        self._router = PrefixRouter()
        self._attempts: dict[str, Attempt] = {}
        self._by_ticket: dict[int, Attempt] = {}
        self._tickets = count()
        self._events: list[Event | Traced] = []
        # The stage is built before its link is created.
        self._is_up = [True] * len(self._supervisors)
        self._outboxes: list[list[Command]] = [[] for _ in self._supervisors]
        self._idle_at = [-1] * len(self._supervisors)
        self._has_moved = False
        self._on_event: Callable[[], object] = lambda: None

    def notify(self, on_event: Callable[[], object]) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        self._on_event = on_event
        for supervisor in self._supervisors:
            supervisor.on_event = on_event

    @property
    def has_requests(self) -> bool:
        """True if any worker has a request, or gets one when it is up."""
        return bool(self._attempts)

    @property
    def has_work(self) -> bool:
        """True if there are events, or unread messages of any worker."""
        return bool(self._events) or any(self._inboxes)

    def check_idle(self) -> bool:
        """Return True if every worker is idle after executing all commands sent to it."""
        if self._has_moved or self._events:
            self._has_moved = False
            return False
        # num_commands includes the commands to a worker's other stages.
        busy = {attempt.replica for attempt in self._attempts.values()}
        return all(self._idle_at[each] == self._supervisors[each].num_commands for each in busy)

    def send(self, command: Command) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        self._has_moved = True
        if isinstance(command, Enter):
            self._enter(command)
            return
        attempt = self._attempts.get(command.request_id)
        if attempt is None:
            return
        match command:
            case Extend():
                attempt.extends.append(command)
            case Credit():
                place = attempt.places[command.consumer]
                attempt.places[command.consumer] = place.answered(command)
            case Abort():
                self._forget(attempt)
        self._queue(attempt, command)

    def drop_all(self) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        attempts, self._attempts = self._attempts, {}
        self._by_ticket, self._events = {}, []
        for attempt in attempts.values():
            self._queue(attempt, Abort(attempt.enter.request_id))

    def events(self) -> Sequence[Event | Traced]:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        self._receive()
        events, self._events = self._events, []
        self._has_moved |= bool(events)
        return events

    def _receive(self) -> None:
        for replica, inbox in enumerate(self._inboxes):
            while inbox:
                generation, message = inbox.popleft()
                # An old worker's message may come late.
                self._generations[replica] = max(self._generations[replica], generation)
                self._handle_message(replica, message)

    def _enter(self, enter: Enter) -> None:
        self._receive()  # a worker may have come back since events() was last called
        places = {edge.consumer: StreamPlace() for edge in self._edges} | dict(enter.streams)
        emitted = OutputAccumulator(enter.request_id, self._name)
        attempt = Attempt(enter, next(self._tickets), emitted, places=places)
        self._attempts[enter.request_id] = self._by_ticket[attempt.ticket] = attempt
        self._place(attempt)

    def _place(self, attempt: Attempt) -> None:
        """Choose a replica for a new run, and send it there if that is up."""
        states = [supervisor.state for supervisor in self._supervisors]
        loads = {each: 0 for each, state in enumerate(states) if why_lost([state]) is None}
        if not loads:
            self._fail(attempt, str(why_lost(states)))
            return
        for other in self._attempts.values():
            if other is not attempt and other.replica in loads:
                loads[other.replica] += 1
        up = {each: load for each, load in loads.items() if self._is_up[each]}
        attempt.replica = self._router.choose(attempt.enter, up or loads)
        self._queue(attempt, attempt.entry(), *attempt.extends)

    def _queue(self, attempt: Attempt, *commands: Command) -> None:
        """Queue commands about a request for its worker; ``Built`` resends all to one not up."""
        if self._is_up[attempt.replica]:
            self._outboxes[attempt.replica] += commands

    def flush(self) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        for replica, outbox in enumerate(self._outboxes):
            if outbox:
                self._outboxes[replica] = []
                self._dispatch(replica, tuple(outbox))

    def _dispatch(self, replica: int, commands: tuple[Command, ...]) -> None:
        try:
            self._supervisors[replica].send(
                self._generations[replica], Commands(self._name, commands)
            )
            for command in commands:
                if isinstance(command, Enter) and command.request_id in self._attempts:
                    self._attempts[command.request_id].is_sent = True
        except ConnectionError:
            return  # they are sent to the next worker
        except (ValueError, MemoryError) as error:
            if len(commands) > 1:  # one of them cannot be sent; the others may be
                for command in commands:
                    self._dispatch(replica, (command,))
                return
            attempt = self._attempts.get(commands[0].request_id)
            if attempt is not None:
                has_begun = not isinstance(commands[0], Enter)
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                is_prompts = not kind and isinstance(commands[0], Enter) and not commands[0].sources
                self._fail(attempt, f"{kind}{error}", has_begun=has_begun, refused=is_prompts)
                if has_begun:
                    self._queue(attempt, Abort(attempt.enter.request_id))

    def _handle_message(self, replica: int, message: Any) -> None:
        match message:
            case tuple():
                for event in message:
                    if isinstance(event, Traced):
                        self._events.append(event)
                    else:
                        self._handle_event(event)
            case Idle():
                self._idle_at[replica] = message.num_commands
            case Built():
                self._is_up[replica] = True
                self._trace("worker started", replica)
                self._outboxes[replica] = []
                self._idle_at[replica] = -1
                for attempt in self._attempts_of(replica):
                    self._queue(attempt, attempt.entry(), *attempt.extends)
            case NotBuilt():
                _logger.warning(
                    "a worker of stage %r cannot be built: %s", self._name, message.error
                )
            case WorkerState():
                self._worker_ended(replica, message)

    def _handle_event(self, event: Event) -> None:
        attempt = self._by_ticket.get(event.ticket)
        if attempt is None:
            return
        match event:
            case Ack():
                if attempt.take():
                    self._events.append(Ack(attempt.enter.ticket))
            case Failed():
                if event.is_stages and attempt.num_runs <= self._max_retries:
                    self._run_again(attempt)
                else:
                    self._forget(attempt)
                    failed = msgspec.structs.replace(event, ticket=attempt.enter.ticket)
                    self._events.append(failed)
            case Output():
                self._handle_output(attempt, event)

    def _handle_output(self, attempt: Attempt, event: Output) -> None:
        delta = event.delta
        if delta is not None and delta.error is not None and attempt.num_runs <= self._max_retries:
            # It may have been interrupted; an error of the request itself occurs again.
            self._run_again(attempt)
            return
        try:
            new = attempt.new_in(event)
        except ValueError:
            self._queue(attempt, Abort(attempt.enter.request_id))
            error = "its worker died, and another run did not say what the first one had said"
            self._fail(attempt, error)
            return
        if delta is not None and delta.finished:
            if delta.error is None:
                self._supervisors[attempt.replica].num_starts = 0
            self._forget(attempt)
        if new is not None:
            self._events.append(new)

    def _worker_ended(self, replica: int, ended: WorkerState) -> None:
        """Handle the end of a worker: run its requests again."""
        self._is_up[replica] = False
        self._trace("worker ended", replica, reason=str(ended.last_end))
        self._outboxes[replica] = []
        self._idle_at[replica] = -1
        self._router.forget(replica)
        if ended.state == "down":
            _logger.error("stage %r: a worker %s, for the last time", self._name, ended.last_end)
        for attempt in self._attempts_of(replica):
            if attempt.is_sent and attempt.num_runs > self._max_retries:
                runs = f"{attempt.num_runs} times" if attempt.num_runs > 1 else "once"
                message = (
                    f"its worker {ended.last_end} while it had this request; it was run {runs}"
                )
                self._fail(attempt, message)
            elif attempt.is_sent:
                self._run_again(attempt)
            else:
                self._place(attempt)

    def _attempts_of(self, replica: int) -> list[Attempt]:
        return [each for each in self._attempts.values() if each.replica == replica]

    def _run_again(self, attempt: Attempt) -> None:
        del self._by_ticket[attempt.ticket]
        attempt.begin_again(next(self._tickets))
        self._by_ticket[attempt.ticket] = attempt
        self._place(attempt)
        self._trace(RUN_AGAIN, attempt.replica, attempt.enter.request_id, run=attempt.num_runs)

    def _trace(
        self, name: str, replica: int, request_id: str | None = None, **args: int | str
    ) -> None:
        """Record an event that no worker can record, if the run is traced."""
        if self._supervisors[replica].spec.is_traced:
            now_s = time.monotonic()
            event = StageEvent(name, now_s, None, request_id, args)
            self._events.append(Traced((event,), replica, this_clock(), now_s))

    def _fail(
        self, attempt: Attempt, error: str, *, has_begun: bool = True, refused: bool = False
    ) -> None:
        self._forget(attempt)
        message = f"stage {self._name!r}: {error}"
        self._events.append(Failed(attempt.enter.ticket, message, has_begun, refused))
        self._on_event()

    def _forget(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.enter.request_id, None)
        self._by_ticket.pop(attempt.ticket, None)


_CALL_TIMEOUT_S = 0.2


def _fact_property(name: str) -> Any:
    """Return a property that reads a field of the stage's ``StageFacts``."""
    return property(lambda stage: getattr(stage._facts, name))


class RemoteStage(Stage):
    """Local representative of a stage whose workers run in other processes.

    Args:
        workers: one per replica; they are up.
        max_retries: maximum number of retries of a request whose worker died.
    """

    def __init__(
        self,
        name: str,
        config: Stage | StageConfig,
        workers: Sequence[WorkerSupervisor],
        max_retries: int,
    ) -> None:
        super().__init__(
            name,
            inputs=config.inputs,
            outputs=getattr(config, "outputs", None),
            final_output=config.final_output,
        )
        first = workers[0]
        assert first.facts is not None, "its workers have built it"
        self._facts = first.facts[name]
        self.has_cache = self._facts.has_cache
        self._enable_prefix_caching = self._facts.enable_prefix_caching
        self.workers = tuple(workers)
        (edges,) = (stage.edges for stage in first.spec.stages if stage.name == name)
        self.link = RemoteLink(name, workers, edges, max_retries)
        self._checked: set[str] = set()

    def worker_states(self) -> tuple[WorkerState, ...]:
        """Return the states of its workers, by replica, without waiting for them."""
        return tuple(worker.state for worker in self.workers)

    @property
    def dtype(self) -> torch.dtype | None:
        """See :class:`~stages.stage.Stage`."""
        import torch  # imported here only: a link does not need it

        return None if self._facts.dtype is None else getattr(torch, self._facts.dtype)

    hidden_size = _fact_property("hidden_size")
    sampling = _fact_property("sampling")
    seed = _fact_property("seed")
    speakers = _fact_property("speakers")
    takes_chunks = _fact_property("takes_chunks")
    gives_chunks = _fact_property("gives_chunks")

    def describe(self) -> Mapping[str, Any]:
        """Return what a worker resolved and reserved."""
        return dict(self._facts.description)

    def check_sampling(self, params: SamplingParams) -> None:
        """See :class:`~stages.stage.Stage`; parameters that passed are cached.

        If the worker does not answer promptly, the check is left to it: it refuses the request.
        """
        key = params.model_dump_json(exclude={"seed"})
        if key in self._checked:
            return
        up = next((worker for worker in self.workers if worker.is_up), self.workers[0])
        try:
            up.call(self.name, "check_sampling", params, timeout_s=_CALL_TIMEOUT_S)
        except (RuntimeError, TimeoutError):
            return
        if len(self._checked) < 1000:
            self._checked.add(key)

    @property
    def has_unfinished_requests(self) -> bool:
        """True if its workers have requests."""
        return self.link.has_requests

    @property
    def enable_prefix_caching(self) -> bool:
        """See :class:`~stages.stage.Stage`."""
        return self._enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value: bool) -> None:
        self._call_all("set_enable_prefix_caching", value)
        self._enable_prefix_caching = value

    def reset_prefix_cache(self) -> None:
        """See :class:`~stages.stage.Stage`."""
        self._call_all("reset_prefix_cache")

    def check_integrity(self) -> None:
        """See :class:`~stages.stage.Stage`."""
        self._call_all("check_integrity")

    def _call_all(self, method: str, *arguments: Any) -> None:
        for worker in self.workers:
            worker.call_when_up(self.name, method, *arguments)

    def stats(self) -> StageStats:
        """Return the counters of its workers, including the last reports of those that died."""
        return reduce(StageStats.beside, self.replica_stats())

    def replica_stats(self) -> tuple[StageStats, ...]:
        """Return the same for each worker."""
        return tuple(worker.stats()[self.name] for worker in self.workers)

    def close(self) -> None:
        """End its workers, and with them all stages that share them."""
        self.ownership.close()
        for worker in self.workers:
            worker.close()

    def add_request(self, request: StageRequest) -> None:
        """Raise ``RuntimeError``: requests enter through the link only."""
        raise RuntimeError(f"stage {self.name!r} runs elsewhere; ask its pipeline")

    def step(self) -> list[StageOutput]:
        """Raise ``RuntimeError``: the worker steps by itself."""
        raise RuntimeError(f"stage {self.name!r} runs elsewhere, where it is stepped")

    def abort(self, request_id: str) -> None:
        """Raise ``RuntimeError``: requests are aborted through the link only."""
        raise RuntimeError(f"stage {self.name!r} runs elsewhere; ask its pipeline")
