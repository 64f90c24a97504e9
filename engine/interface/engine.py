"""The interface of every engine: requests in by id, outputs out step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from engine.interface.arguments import check_argument, check_sampling_argument
from engine.interface.ownership import Ownership
from engine.interface.placed_error import described

if TYPE_CHECKING:
    import torch

    from engine.interface.outputs import EngineStats, OutputDelta
    from engine.interface.prompts import Prompt
    from engine.interface.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """The arguments of :meth:`engine.Engine.prepare`, type-checked except for the prompt."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams | None = None
    priority: int = 0
    cache_salt: str | None = None
    order: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """A request that an engine has prepared, to pass to its :meth:`engine.Engine.add`."""

    request_id: str
    engine: Engine[Any]
    content: Any


OutputT_co = TypeVar("OutputT_co", covariant=True)
T = TypeVar("T")


class EngineBrokenError(RuntimeError):
    """An engine was interrupted, could not restart, and is no longer usable."""

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"the engine was interrupted ({cause}) and could not restart; build a new one"
        )


class Engine(ABC, Generic[OutputT_co]):
    """Runs one model for requests that arrive and end at any time. ::

        add_request ──► step ──► output ──► step ──► ... ──► output, finished
                         ▲         └──► abort: no more output
        needs_input? ──► extend_request

    A request's id is its handle: live from ``add_request`` to the ``finished`` output or to
    ``abort``, and reusable after that. A request may end before its caller notices, so a call for
    a request that is not live does nothing.

    One thread drives an engine. Every call leaves it consistent, even if it raises; a call that
    raises ``ValueError`` has changed nothing. Only ``step`` runs the model. Requests and steps are
    refused, by a ``RuntimeError`` with a suggestion, while another thread is in the engine, after
    :meth:`close`, and in a process that was forked after the engine was built.

    Attributes:
        hidden_size: width of the accepted embeddings and of its ``hidden_states``; None without.
        dtype: element type of weights and activations.
        enable_prefix_caching: True if requests reuse results of earlier ones; can be set while no
            request is live. Never changes an output.
        takes_chunks: True if prompts may arrive in chunks: a first one, and more by
            ``extend_request``.
    """

    ownership: Ownership
    # The live requests by id, oldest first.
    _live: dict[str, Any]
    _orders: Iterator[int]
    hidden_size: int | None
    dtype: torch.dtype
    enable_prefix_caching: bool
    takes_chunks: bool = False
    # The interruption that the engine restarts from; and a mark of the current or last call:
    # results recorded under this mark were not emitted if the call is interrupted.
    _broken_by: str | None = None
    _call: object = None

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Record the process that builds it, independently of a subclass's constructor."""
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
            ValueError: the request cannot run, even alone with the whole pool.
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
        """Do the slow work for :meth:`add`: tokenize, decode, compute features and hash.

        Thread-safe, even while the engine steps. It changes nothing; a request that is never added
        leaves nothing behind.

        Args:
            request_id: unique among the live requests when it is added.
            prompt: the prompt or its first chunk; must not be changed until the request ends.
            sampling: the sampling parameters; None uses the defaults. See :meth:`check_sampling`.
                Without a seed, they get the engine's next one. Set seeds if requests that are
                prepared in several threads need the same ones in every run.
            priority: lower runs earlier.
            cache_salt: cached results are shared only within one salt.
            order: among requests of one priority, the smallest runs first. By default they run in
                the order of the calls of this method.

        Raises:
            ValueError: the request cannot run, even alone with the whole pool.
        """
        self.ownership.check()
        # Later, these would fail together with the engine's other requests.
        check_argument("request_id", request_id, str, "a str")
        check_sampling_argument(sampling)
        check_argument("priority", priority, int, "an int, lower for earlier")
        check_argument("cache_salt", cache_salt, str | None, "a str or None")
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
        """See :meth:`prepare`; returns the argument of :meth:`_add`."""

    @abstractmethod
    def _add(self, content: Any) -> None:
        """See :meth:`add`; may be interrupted at any point."""

    def check_sampling(self, params: SamplingParams) -> None:
        """Refuse sampling parameters that no request could use; without tokens, refuse all.

        Raises:
            ValueError: the model does not support them.
        """
        raise ValueError("it generates no tokens, so it takes no sampling parameters")

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        """Add the next chunk of a live request's prompt; its ``is_last`` ends the prompt.

        Raises:
            ValueError: the model takes no chunks, or not this one; the request keeps waiting.
        """
        raise ValueError("the model takes prompts whole, not in chunks")

    def needs_input(self, request_id: str) -> bool:
        """Return True if a live request needs its next chunk to continue."""
        return False

    def step(self) -> Sequence[OutputT_co]:
        """Run one batch; return the outputs that changed, finished or not.

        Requests that fail end with an output that states the reason; others continue. Does nothing
        if idle. On any interruption (a signal, a lack of memory), all requests restart before the
        exception propagates, and the cache is dropped.

        Raises:
            EngineBrokenError: the restart was interrupted as well, now or earlier.
        """
        return self._consistently(self._step)

    def step_deltas(self) -> Sequence[OutputDelta]:
        """Run :meth:`step`, but return only the changes of outputs; for stages.

        Use one of the two methods for all steps of a request.
        """
        return self._consistently(self._step_deltas)

    @property
    def is_broken(self) -> bool:
        """True if it could not restart, so that requests and steps are refused."""
        return self._broken_by is not None

    def _consistently(self, call: Callable[[], T], *, wait: bool = False) -> T:
        """Make a call; restart all requests if it is interrupted.

        Args:
            call: called while no other thread is in the engine.
            wait: True to wait for another thread in the engine, instead of raising.
        """
        self.ownership.check()
        if self._broken_by is not None:
            raise EngineBrokenError(self._broken_by)
        was_inside, has_begun = self.ownership.is_inside, False
        try:
            self.ownership.enter(wait=wait)
            self._call, has_begun = object(), True
            result = call()
            # Inside the try: an interruption after the call must restart all requests as well.
            if not was_inside:
                self.ownership.leave()
            return result
        except BaseException as error:
            if has_begun:
                # Set first, before anything can fail: it is broken until it has restarted.
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
        """See :meth:`step`; may be interrupted at any point."""

    def _step_deltas(self) -> Sequence[OutputDelta]:
        """See :meth:`step_deltas`; may be interrupted at any point."""
        return [output.as_delta() for output in self._step()]  # type: ignore[attr-defined]

    @property
    def _can_restart(self) -> bool:
        """True if everything that it needs to run still exists."""
        return True

    @abstractmethod
    def _restart(self) -> None:
        """Rebuild all state from the live requests themselves."""

    def abort(self, request_id: str) -> None:
        """Drop a live request and free its resources; no output follows. Ignores other ids."""
        if not self.ownership.is_over:
            self._consistently(partial(self._drop, request_id), wait=True)

    def _drop(self, request_id: str) -> None:
        """See :meth:`abort`; the request may have ended. May be interrupted at any point."""
        self._live.pop(request_id, None)

    @property
    def live_request_ids(self) -> tuple[str, ...]:
        """Ids of the requests that were added and have not ended, oldest first."""
        return tuple(self._live)

    @property
    def has_unfinished_requests(self) -> bool:
        """True if any request is live, including those waiting for input or paused."""
        return bool(self._live)

    def reset_prefix_cache(self) -> None:
        """Drop cached results of requests that are no longer live; as atomic as ``step``."""
        self._consistently(self._reset_prefix_cache)

    @abstractmethod
    def _reset_prefix_cache(self) -> None:
        """See :meth:`reset_prefix_cache`; may be interrupted at any point."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """Describe the resolved settings and reserved memory, for people."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise ``IntegrityError``, naming the failed equation, if anything was lost."""

    def close(self) -> None:
        """Drop all requests and refuse new ones; the last reference frees weights and pages.

        Idempotent. Does nothing in a fork of the process that built the engine.
        """
        if not self.ownership.is_over:
            if self._broken_by is None:
                for request_id in self.live_request_ids:
                    self.abort(request_id)
            self.ownership.close()
