"""The contract of every engine: requests in by an id, outputs out step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from engine.interface.arguments import check_request_arguments
from engine.interface.ownership import Ownership
from engine.interface.placed_error import described

if TYPE_CHECKING:
    import torch

    from engine.interface.outputs import EngineStats, OutputDelta
    from engine.interface.prompts import Prompt
    from engine.interface.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """The arguments of :meth:`engine.Engine.prepare`; types are checked, but for the prompt's."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams | None = None
    priority: int = 0
    cache_salt: str | None = None
    order: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """A request that an engine has prepared, for its :meth:`engine.Engine.add`."""

    request_id: str
    engine: Engine[Any]
    content: Any


OutputT_co = TypeVar("OutputT_co", covariant=True)
T = TypeVar("T")


class EngineBrokenError(RuntimeError):
    """An engine was interrupted and could not restart; it is not to be used any more."""

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"the engine was interrupted ({cause}) and could not restart; build a new one"
        )


class Engine(ABC, Generic[OutputT_co]):
    """Runs one model over requests that come and go. ::

        add_request ──► step ──► output ──► step ──► ... ──► output, finished
                         ▲         └──► abort: no more output
        needs_input? ──► extend_request

    A request's id is the handle to it: live from ``add_request`` to the output that says
    ``finished``, or to ``abort``, and free to be used again after that. A request may end before
    its caller has seen so, hence a call about one that is not live does nothing.

    One thread drives an engine. Every call leaves it consistent, also one that raises; one that
    raises ``ValueError`` has changed nothing. Only ``step`` runs the model. Requests and steps are
    refused, by a ``RuntimeError`` that says what to do, while another thread is in the engine,
    after :meth:`close`, and in a process that was forked after the engine was built.

    Attributes:
        hidden_size: width of the embeddings it takes and of its ``hidden_states``; None without.
        dtype: element type of weights and activations.
        enable_prefix_caching: whether requests reuse what was computed for earlier ones; may be
            set while no request is live. Never changes an output.
    """

    ownership: Ownership
    # The requests that were added and have not ended, by their ids, oldest first.
    _live: dict[str, Any]
    _orders: Iterator[int]
    hidden_size: int | None
    dtype: torch.dtype
    enable_prefix_caching: bool
    # What interrupted the engine, while it restarts; and a mark of the call that runs or ran
    # last: what it noted under this mark was not emitted to the caller if it is interrupted.
    _broken_by: str | None = None
    _call: object = None

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Note in which process it is built, whatever the constructor of a kind of engine does."""
        engine = super().__new__(cls)
        engine.ownership = Ownership(f"this {cls.__name__}")
        engine._orders = count()
        return engine

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request; nothing runs before ``step``. See :meth:`prepare` and :meth:`add`.

        Raises:
            ValueError: this request cannot run, alone and with the whole pool to itself.
        """
        self.add(
            self.prepare(request_id, prompt, sampling, priority=priority, cache_salt=cache_salt)
        )

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        order: int | None = None,
    ) -> PreparedRequest:
        """Tokenize, decode, compute features and hash, all that may take long, for :meth:`add`.

        For any thread, several at once, also while the engine steps. It changes nothing; a request
        that is never added leaves nothing behind.

        Args:
            request_id: unique among the live ones when it is added.
            prompt: what to run, or its first chunk; not to be changed until the request ends.
            sampling: how tokens are chosen; None takes the defaults. See :meth:`check_sampling`.
                One without a seed gets the engine's next. Give seeds, if requests that are
                prepared in several threads are to have the same ones in every run.
            priority: lower runs earlier.
            cache_salt: what was computed is shared only within one salt.
            order: among requests of one priority, the smallest runs first. By default they run in
                the order of the calls of this method.

        Raises:
            ValueError: this request cannot run, alone and with the whole pool to itself.
        """
        self.ownership.check()
        check_request_arguments(request_id, sampling, priority, cache_salt)
        place = next(self._orders) if order is None else order
        new = NewRequest(request_id, prompt, sampling, priority, cache_salt, place)
        return PreparedRequest(request_id, self, self._prepare(new))

    def add(self, prepared: PreparedRequest) -> None:
        """Queue a request that this engine has prepared.

        Raises:
            ValueError: its id belongs to a live request, or another engine prepared it.
        """
        if prepared.engine is not self:
            raise ValueError(f"request {prepared.request_id!r} was prepared by another engine")
        if prepared.request_id in self._live:
            raise ValueError(
                f"request_id {prepared.request_id!r} is already in use by a live request"
            )
        self._consistently(partial(self._add, prepared.content))

    @abstractmethod
    def _prepare(self, new: NewRequest) -> Any:
        """See :meth:`prepare`; returns what :meth:`_add` takes."""

    @abstractmethod
    def _add(self, content: Any) -> None:
        """See :meth:`add`; may be interrupted anywhere."""

    def check_sampling(self, params: SamplingParams) -> None:
        """Refuse sampling parameters that no request could run with; an engine without tokens, all.

        Raises:
            ValueError: the model cannot do what they ask for.
        """
        raise ValueError("it generates no tokens, so it takes no sampling parameters")

    @property
    def takes_chunks(self) -> bool:
        """Whether prompts may come in chunks: a first one, and more by ``extend_request``."""
        return False

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        """Hand in the next chunk of a live request's prompt; ``is_last`` of it says if it ends.

        Raises:
            ValueError: the model takes prompts whole, or not this chunk; the request waits on.
        """
        raise ValueError("the model takes prompts whole, not in chunks")

    def needs_input(self, request_id: str) -> bool:
        """Whether a live request cannot go on before its next chunk comes."""
        return False

    def step(self) -> Sequence[OutputT_co]:
        """Run one batch; return the outputs that moved, finished or not.

        Requests that fail end with an output that says why; others go on. Idle: nothing happens.
        Whatever interrupts it, wherever (a signal, a lack of memory), every request starts again
        before the exception is passed on, and what was cached is forgotten.

        Raises:
            EngineBrokenError: restarting was interrupted as well, now or before.
        """
        return self._consistently(self._step)

    def step_deltas(self) -> Sequence[OutputDelta]:
        """The same as :meth:`step`, of which it returns only what is new: for stages.

        A request's outputs come by one of the two, not by both in turn.
        """
        return self._consistently(self._step_deltas)

    @property
    def is_broken(self) -> bool:
        """Whether it could not restart, so that requests and steps are refused."""
        return self._broken_by is not None

    def _consistently(self, call: Callable[[], T], *, wait: bool = False) -> T:
        """Make a call; restart all requests if it is interrupted.

        Args:
            call: to make while no other thread is in the engine.
            wait: for one that is, instead of being refused.
        """
        self.ownership.check()
        if self._broken_by is not None:
            raise EngineBrokenError(self._broken_by)
        was_inside, has_begun = self.ownership.is_inside, False
        try:
            self.ownership.enter(wait=wait)
            self._call, has_begun = object(), True
            result = call()
            # Here, since an interruption after the call must restart all as well.
            if not was_inside:
                self.ownership.leave()
            return result
        except BaseException as error:
            if has_begun:
                # At once, whatever else may go wrong: until it has restarted, it is broken.
                self._broken_by = "an exception"
                self._broken_by = described(error)
                if self._can_restart:
                    self._restart()
                    self._broken_by = None
            if not was_inside:
                self.ownership.leave()
            raise

    @abstractmethod
    def _step(self) -> Sequence[OutputT_co]:
        """See :meth:`step`; may be interrupted anywhere."""

    def _step_deltas(self) -> Sequence[OutputDelta]:
        """See :meth:`step_deltas`; may be interrupted anywhere."""
        return [output.as_delta() for output in self._step()]  # type: ignore[attr-defined]

    @property
    def _can_restart(self) -> bool:
        """Whether all is there that it runs with."""
        return True

    @abstractmethod
    def _restart(self) -> None:
        """Build everything again from what the live requests themselves hold."""

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds; no output of it follows. Others are ignored."""
        if not self.ownership.is_over:
            self._consistently(partial(self._drop, request_id), wait=True)

    def _drop(self, request_id: str) -> None:
        """See :meth:`abort`; the request may have ended, and this be interrupted anywhere."""
        self._live.pop(request_id, None)

    @property
    def live_request_ids(self) -> tuple[str, ...]:
        """The requests that were added and have not ended, oldest first."""
        return tuple(self._live)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether requests are live, those that wait for input or are paused included."""
        return bool(self._live)

    def reset_prefix_cache(self) -> None:
        """Forget what was computed for requests that are no longer live; as whole as ``step``."""
        self._consistently(self._reset_prefix_cache)

    @abstractmethod
    def _reset_prefix_cache(self) -> None:
        """See :meth:`reset_prefix_cache`; may be interrupted anywhere."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Read the counters; the reading does not change any more."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """What the engine resolved and reserved, for people."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise ``IntegrityError``, with the equation that failed, if anything was lost."""

    def close(self) -> None:
        """Drop all requests and take no more; weights and pages go with the last reference.

        May be called again. In a fork of the process that built the engine it does nothing.
        """
        if not self.ownership.is_over:
            if self._broken_by is None:
                for request_id in self.live_request_ids:
                    self.abort(request_id)
            self.ownership.close()
