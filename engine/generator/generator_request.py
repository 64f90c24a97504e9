"""One utterance on its way through a ``GeneratorEngine``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.interface.outputs import GeneratorOutput, RequestMetrics
from engine.interface.waveform import Waveform

__all__ = ["CodeWindow", "GeneratorRequest", "WindowSizes"]


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """How chunks are cut, in codes; see ``StreamWindow``."""

    first: int
    chunk: int
    left: int
    right: int

    def kept(self, num_done: int) -> int:
        """What the window gives that follows ``num_done`` codes: 1, 2, 4, ... times ``first``."""
        return min(num_done + self.first, self.chunk)


@dataclass(frozen=True, slots=True)
class CodeWindow:
    """Codes ``start`` to ``stop``, of which those from ``kept`` to ``kept_stop`` give sound."""

    start: int
    stop: int
    kept: int
    kept_stop: int

    @property
    def num_codes(self) -> int:
        """Codes to compute."""
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class GeneratorRequest:
    """A validated utterance, and how far it has come.

    Attributes:
        request_id: unique among the engine's live requests.
        speaker: whose voice, by name; None where there is nothing to choose.
        priority: lower first.
        arrival_index: order among equal priorities.
        whole: it came in one piece and is computed in one.
        state: what the model handed on behind the codes that are done.
        codes: that came so far.
        is_last: whether all came.
        is_cut_off: whether the last said that a limit of length cut them off.
        num_done: codes whose sound is made.
        pieces: that sound, ``(num_samples,)`` each.
        arrival: when it came, by ``time.monotonic``.
        started: when it first ran.
        num_waits: steps for which its next window has waited for others.
    """

    request_id: str
    speaker: str | None
    priority: int
    arrival_index: int
    whole: bool
    state: Any
    codes: list[Any] = field(default_factory=list)
    is_last: bool = False
    is_cut_off: bool = False
    num_done: int = 0
    pieces: list[Tensor] = field(default_factory=list)
    arrival: float = field(default_factory=time.monotonic)
    started: float | None = None
    num_waits: int = 0

    @property
    def is_done(self) -> bool:
        """Whether all its sound is made; at once if it has no codes."""
        return self.is_last and self.num_done == len(self.codes)

    def next_window(self, sizes: WindowSizes) -> CodeWindow | None:
        """What to compute next; None if more codes must come first, or none are left.

        Where windows lie depends on the codes alone, not on how they came: one is cut off only
        when there is a code beyond it, which is known either way before it runs. The last takes
        what is left, ``right`` codes more than its turn at most::

            codes   0 .................................. n
            kept    | first | 2 x first | rest |           rest <= 4 x first + right
        """
        done, available = self.num_done, len(self.codes)
        if self.whole:
            return CodeWindow(0, available, 0, available) if done < available else None
        coming = self.coming_window(sizes)
        if available > coming.stop:
            return coming
        if self.is_last and done < available:
            return CodeWindow(coming.start, available, done, available)
        return None

    def coming_window(self, sizes: WindowSizes) -> CodeWindow:
        """The next window of an utterance that comes in chunks, if its codes go on for so long."""
        done = self.num_done
        kept_stop = done + sizes.kept(done)
        return CodeWindow(max(0, done - sizes.left), kept_stop + sizes.right, done, kept_stop)

    def needs_input(self, sizes: WindowSizes) -> bool:
        """Whether it cannot go on before its next chunk comes."""
        return not self.is_last and self.next_window(sizes) is None

    def output(self, samples: Tensor, sampling_rate: int) -> GeneratorOutput:
        """The next output, with what was made since the one before: the last of ``pieces``."""
        finished = self.is_done
        return GeneratorOutput(
            request_id=self.request_id,
            finished=finished,
            delta=Waveform(samples, sampling_rate),
            waveform=Waveform(torch.cat(self.pieces), sampling_rate) if finished else None,
            num_codes=len(self.codes),
            is_cut_off=self.is_cut_off,
            metrics=self._metrics(finished),
        )

    def failure(self, message: str) -> GeneratorOutput:
        """The last output of a request that failed."""
        return GeneratorOutput(
            request_id=self.request_id,
            finished=True,
            delta=None,
            waveform=None,
            num_codes=len(self.codes),
            error=message,
            metrics=self._metrics(True),
        )

    def _metrics(self, finished: bool) -> RequestMetrics:
        started = time.monotonic() if self.started is None else self.started
        return RequestMetrics(
            queue_s=started - self.arrival,
            total_s=time.monotonic() - self.arrival if finished else None,
        )
