"""Runs one generator: codec tokens of utterances in, waveforms out, whole or chunk by chunk.

Exactness of streaming: a causal vocoder keeps a state between chunks; its streamed speech equals
that of the whole. The flow of a windowed vocoder is an equation that is solved over the whole
utterance at once. A layer sees at most one block to the left or right, but the layers of a pass and
then the passes (four for each step of the solver) add up, so that every sample depends on nearly
every code. Speech emitted before the last code is known therefore cannot equal that of the whole
utterance; it is close, and closer with wider windows. These properties hold: equal noise at equal
positions; no dependence on how the codes arrived or (but for rounding in batches of other sizes) on
other requests; and identical speech for an utterance that fits the first window."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import index
from typing import Any

import torch
from torch import Tensor

from engine.interface.arguments import check_argument
from engine.interface.config import GeneratorConfig
from engine.interface.engine import Engine, NewRequest
from engine.interface.log_fields import package_logger
from engine.interface.outputs import (
    EngineStats,
    GeneratorOutput,
    RequestMetrics,
    Waveform,
)
from engine.interface.placed_error import described
from engine.interface.prompts import CodecPrompt, Prompt
from engine.models.base import CodeChunk, GeneratorModel
from engine.models.model_loader import load_generator, open_checkpoint
from engine.resources.device import are_finite, on_device, resolve_device
from engine.resources.memory_plan import format_bytes
from prefix_cache import IntegrityError


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """Sizes of the windows that utterances are cut into, in codes; see ``StreamWindow``."""

    first: int
    chunk: int
    growth: int
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class CodeWindow:
    """Codes ``start`` to ``stop``; only ``kept`` to ``kept_stop`` contribute sound."""

    start: int
    stop: int
    kept: int
    kept_stop: int

    @property
    def num_codes(self) -> int:
        """Number of codes to compute."""
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class GeneratorRequest:
    """A validated utterance and its progress.

    Attributes:
        request_id: unique among the engine's live requests.
        speaker: name of the voice; None for a checkpoint without a choice of voices.
        whole: True if all codes came at once and are computed in one pass.
        state: the model's state after the codes that are done.
        is_cut_off: True if the last chunk reported that a length limit cut the codes off.
        pieces: the samples computed so far, ``(num_samples,)`` each.
        arrival: arrival time, by ``time.monotonic``.
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
        """True if all its sound is computed; immediately for an utterance without codes."""
        return self.is_last and self.num_done == len(self.codes)

    def next_window(self, sizes: WindowSizes) -> CodeWindow | None:
        """Return the next window; None if more codes must come first, or none are left.

        The position of windows depends on the codes alone, not on how they arrived. The last window
        takes the rest, at most ``right`` codes more than its size; so if ``right`` is not 0, a
        window is cut off only when there is a code beyond it. With a growth of 2::

            codes   0 .................................. n
            kept    | first | 2 x first | rest |           rest <= 4 x first + right
        """
        done, available = self.num_done, len(self.codes)
        if self.whole:
            return CodeWindow(0, available, 0, available) if done < available else None
        coming = self.coming_window(sizes)
        if available + (not sizes.right) > coming.stop:
            return coming
        if self.is_last and done < available:
            return CodeWindow(coming.start, available, done, available)
        return None

    def coming_window(self, sizes: WindowSizes) -> CodeWindow:
        """Return the next window of an utterance in chunks, provided that enough codes follow."""
        done = self.num_done
        # Windows grow as a geometric series: 1, 2, 4, ... times the first, for a growth of 2.
        kept_stop = done + min(done * (sizes.growth - 1) + sizes.first, sizes.chunk)
        return CodeWindow(max(0, done - sizes.left), kept_stop + sizes.right, done, kept_stop)

    def output(
        self, sampling_rate: int, samples: Tensor | None = None, error: str | None = None
    ) -> GeneratorOutput:
        """Return the next output, with the samples since the last one; an error makes it final."""
        finished = self.is_done or error is not None
        now = time.monotonic()
        return GeneratorOutput(
            request_id=self.request_id,
            finished=finished,
            delta=None if samples is None else Waveform(samples, sampling_rate),
            waveform=None
            if error is not None or not finished
            else Waveform(torch.cat(self.pieces), sampling_rate),
            num_codes=len(self.codes),
            is_cut_off=self.is_cut_off and error is None,
            error=error,
            metrics=RequestMetrics(
                queue_s=(now if self.started is None else self.started) - self.arrival,
                total_s=now - self.arrival if finished else None,
            ),
        )


_MAX_FIRST_WAITS, _MAX_WAITS = 2, 8


def gather_windows(
    requests: Iterable[GeneratorRequest],
    sizes: WindowSizes,
    max_batch_size: int,
    *,
    has_new_codes: bool,
) -> list[tuple[GeneratorRequest, CodeWindow]]:
    """Choose windows of one length, of utterances at different positions, that need not wait.

    These are the first ones in the order. A pass over few codes costs hardly less than one over
    eight times as many (26 ms and 55 ms on two cores), while utterances that started one after
    another reach their windows one after another. So a window waits while codes keep arriving and
    another utterance approaches a window of equal length. Other stages work between the steps, so
    that waiting costs nothing extra::

        codes of A  ────────┤ window         │ both in one pass
        codes of B  ──────────────┤ window   │
        codes of C  ────────────────┤        └ C is the last one on the way: none waits longer

    A step without new codes ends all waiting, so that nothing stalls: if codes come from another
    process, that is the very next step. A wait always ends after a few steps: after 2 for an
    utterance's first window, which determines the time to first audio; after 8 for later ones, as
    earlier sound is playing meanwhile.

    Args:
        requests: all live requests, in the order in which they should run. Updates ``num_waits`` of
            those that wait.
        has_new_codes: True if any codes came since the last call.

    Returns:
        One window per chosen request; empty if nothing can run or all should wait.
    """
    ready: dict[int, list[tuple[GeneratorRequest, CodeWindow]]] = {}
    coming: set[int] = set()
    for request in requests:
        window = request.next_window(sizes)
        if window is not None:
            ready.setdefault(window.num_codes, []).append((request, window))
        elif not request.is_last:
            coming.add(request.coming_window(sizes).num_codes)
    chosen: list[tuple[GeneratorRequest, CodeWindow]] = []
    for num_codes, windows in ready.items():
        batch = windows[:max_batch_size]
        should_wait = has_new_codes and num_codes in coming
        is_late = any(
            request.num_waits >= (_MAX_WAITS if request.num_done else _MAX_FIRST_WAITS)
            for request, _ in batch
        )
        if not should_wait or len(batch) == max_batch_size or is_late:
            chosen = batch
            break
    for windows in ready.values():
        for request, _ in windows:
            request.num_waits += 1
    for request, _ in chosen:
        request.num_waits = 0
    return chosen


logger = package_logger(__name__)


class GeneratorEngine(Engine[GeneratorOutput]):
    """Batches utterances, or windows of them, of the same length.

    A step may defer a window until others can join it: see :func:`gather_windows`.

    ::

        whole      codes ───────────────────────────► one pass ──► waveform
        in chunks  codes ─► window ─► pass ─► delta
                     more ─► window ─► pass ─► delta ─► ... ──► waveform

    Requests share no state.

    Attributes:
        speakers: names of the checkpoint's voices.

    Raises:
        ValueError: the checkpoint is not a generator, lacks voices, or is too short for the window.
    """

    takes_chunks = True

    def __init__(self, config: GeneratorConfig) -> None:
        fix = "GeneratorConfig(model={})"
        check_argument("config", config, GeneratorConfig, "a GeneratorConfig", fix)
        checkpoint = open_checkpoint(config.model, part=config.part, revision=config.revision)
        self.config = config
        self.hidden_size, self.dtype = None, torch.float32
        self.enable_prefix_caching = True  # stored as set, without effect
        self._model = load_generator(checkpoint, resolve_device(config.device), config.quantization)
        self.speakers = self._model.speakers
        self.sampling_rate = self._model.sampling_rate
        self.samples_per_code = self._model.samples_per_code
        self.max_codes = self._model.max_codes
        changed = sorted(config.generation.model_dump(exclude={"window"}, exclude_defaults=True))
        if changed and not self._model.has_flow:
            raise ValueError(
                f"{config.model!r} has no flow that generation.{changed[0]} could change; take it "
                "out"
            )
        self._window = _window_sizes(config, self._model)
        self._max_batch_size = 1 if config.deterministic else config.max_batch_size
        # Codes came since the last step, so windows may wait for others.
        self._has_new_codes = False
        self._live: dict[str, GeneratorRequest] = {}
        # The mark of the last step's call, and the progress of each live request before it.
        self._before: tuple[object, list[tuple[GeneratorRequest, int, int, Any]]] = None, []
        self._stats = EngineStats()

    def _prepare(self, new: NewRequest) -> GeneratorRequest:
        """Prepare an utterance, or its first chunk.

        A ``CodecPrompt`` with ``is_last`` is computed as a whole, any other in windows.
        Utterances share nothing, so ``cache_salt`` has no effect.
        """
        if new.sampling is not None:
            self.check_sampling(new.sampling)
        codec = _codec_prompt(new.prompt)
        return GeneratorRequest(
            request_id=new.request_id,
            speaker=self._model.choose_speaker(codec.speaker),
            priority=new.priority,
            arrival_index=new.order,
            whole=codec.is_last,
            state=self._model.new_state(),
            codes=self._check_codes(codec, num_before=0),
            is_last=codec.is_last,
            is_cut_off=codec.is_cut_off,
        )

    def _add(self, content: GeneratorRequest) -> None:
        self._live[content.request_id] = content
        self._has_new_codes = True

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        """Append codes to a live utterance; one that is no longer live (it failed) is ignored.

        Raises:
            ValueError: it already has its last codes, or these cannot follow; the engine is
                unchanged.
        """
        request = self._live.get(request_id)
        if request is None:
            return
        if request.is_last:
            raise ValueError(f"request {request_id!r} has all its codes: its last chunk came")
        prompt = _codec_prompt(prompt)
        codes = self._check_codes(prompt, num_before=len(request.codes))
        if prompt.speaker is not None and prompt.speaker != request.speaker:
            raise ValueError(
                f"request {request_id!r} speaks as {request.speaker!r}; "
                f"a later chunk cannot go on as {prompt.speaker!r}"
            )
        request.codes += codes
        request.is_last = prompt.is_last
        request.is_cut_off = prompt.is_cut_off
        self._has_new_codes = True

    def needs_input(self, request_id: str) -> bool:
        """Return True if a request needs its next chunk to continue; False if it is not live."""
        request = self._live.get(request_id)
        if request is None or request.is_last:
            return False
        return request.next_window(self._window) is None

    def _step(self) -> list[GeneratorOutput]:
        """Run one batch and return its outputs; nothing if no window can run yet."""
        clock = time.perf_counter()
        self._before = (
            self._call,
            [
                (request, request.num_done, len(request.pieces), request.state)
                for request in self._live.values()
            ],
        )
        silent = [request for request in self._live.values() if request.is_done]
        outputs = [self._advance(request, torch.zeros(0)) for request in silent]
        order = sorted(self._live.values(), key=lambda r: (r.priority, r.arrival_index))
        limits, has_new_codes = (self._window, self._max_batch_size), self._has_new_codes
        batch = gather_windows(order, *limits, has_new_codes=has_new_codes)
        self._has_new_codes = False
        if batch:
            outputs += self._run(batch)
        if outputs:
            self._stats = self._stats.plus(num_steps=1, busy_s=time.perf_counter() - clock)
        return outputs

    def _restart(self) -> None:
        """Roll back an interrupted step, whose outputs were not emitted."""
        call, before = self._before
        if call is not self._call:
            return
        for request, num_done, num_pieces, state in before:
            request.num_done, request.state = num_done, state
            del request.pieces[num_pieces:]
        self._live = {entry[0].request_id: entry[0] for entry in before}

    def _reset_prefix_cache(self) -> None:
        """Do nothing: no utterance reuses another's results."""

    def stats(self) -> EngineStats:
        """Return the counters; ``prompt_tokens`` counts codes that became sound."""
        return replace(self._stats, num_running=len(self._live))

    def describe(self) -> Mapping[str, Any]:
        """Describe the resolved settings, for people."""
        seconds = self.samples_per_code / self.sampling_rate
        window = self._window
        return {
            "dtype": "float32",
            "device": str(self._model.device),
            "sampling_rate": self.sampling_rate,
            "max_codes": self.max_codes,
            "speakers": list(self.speakers),
            "window": (
                f"{window.first} to {window.chunk} codes ({window.first * seconds:.2f} to "
                f"{window.chunk * seconds:.2f} s), with {window.left} before and {window.right} "
                "after"
            ),
            "memory": [
                f"weights        {format_bytes(self._model.nbytes)} "
                f"({self.config.quantization or 'float32'} on {self._model.device})"
            ],
        }

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if a request's sound does not match its codes."""
        for request in self._live.values():
            found = sum(len(piece) for piece in request.pieces)
            expected = request.num_done * self.samples_per_code
            expected -= self._model.num_missing if request.num_done else 0
            if found != expected or request.num_done > len(request.codes):
                raise IntegrityError(
                    f"request {request.request_id!r}: {found} samples != {request.num_done} of "
                    f"{len(request.codes)} codes * {self.samples_per_code}"
                )

    def _run(self, batch: Sequence[tuple[GeneratorRequest, CodeWindow]]) -> list[GeneratorOutput]:
        """Compute a batch; if it fails, each request alone, so that only the culprit fails."""
        now = time.monotonic()
        for request, _ in batch:
            request.started = now if request.started is None else request.started
        try:
            samples, states = self._compute(batch)
        except Exception as error:  # usually one request's fault: find it
            if len(batch) > 1:
                return [output for item in batch for output in self._run([item])]
            return [self._fail(batch[0][0], error)]
        outputs = []
        for (request, window), row, state in zip(batch, samples, states, strict=True):
            first, stop = window.kept - window.start, window.kept_stop - window.start
            kept = row[first * self.samples_per_code : stop * self.samples_per_code]
            request.num_done, request.state = window.kept_stop, state
            self._stats = self._stats.plus(prompt_tokens=window.kept_stop - window.kept)
            # A copy, which does not keep the window's margins alive.
            outputs.append(self._advance(request, kept.clone()))
        return outputs

    def _compute(
        self, batch: Sequence[tuple[GeneratorRequest, CodeWindow]]
    ) -> tuple[Tensor | Sequence[Tensor], Sequence[Any]]:
        """Return the samples of each window, and each utterance's new state."""
        chunks = [
            CodeChunk(
                torch.tensor(request.codes[window.start : window.stop]),
                window.start,
                request.speaker,
                request.state,
            )
            for request, window in batch
        ]
        with on_device(self._model.device):
            samples, states = self._model.generate(chunks, self.config.generation)
        if not are_finite(list(samples)):
            raise ValueError("the generator gave samples that are not finite")
        return samples, states

    def _advance(self, request: GeneratorRequest, samples: torch.Tensor) -> GeneratorOutput:
        request.pieces.append(samples)
        if request.is_done:
            del self._live[request.request_id]
        return request.output(self.sampling_rate, samples)

    def _fail(self, request: GeneratorRequest, error: Exception) -> GeneratorOutput:
        about = {"request_id": request.request_id}
        logger.error("request %(request_id)s failed", about, exc_info=error, extra=about)
        del self._live[request.request_id]
        message = f"the generator failed: {described(error)}"
        return request.output(self.sampling_rate, error=message)

    def _check_codes(self, prompt: CodecPrompt, *, num_before: int) -> list[Any]:
        num_codebooks, room = self._model.num_codebooks, self.max_codes - num_before
        try:
            # One more than allowed is enough to detect an excess.
            codes = [_read_codes(each, num_codebooks) for each in islice(prompt.codes, room + 1)]
        except TypeError as error:
            raise ValueError(f"codes must be integers: {error}") from error
        if len(codes) > room:
            raise ValueError(
                f"the utterance has {num_before + len(prompt.codes)} codes; this generator takes "
                f"{self.max_codes} at most"
            )
        for position, code in enumerate(codes, num_before):
            for each in code if isinstance(code, tuple) else (code,):
                if not 0 <= each < self._model.num_codes:
                    raise ValueError(
                        f"code {position} is {each}, but the generator knows codes "
                        f"0 to {self._model.num_codes - 1}"
                    )
        return codes


def _read_codes(codes: Any, num_codebooks: int) -> int | tuple[int, ...]:
    """Return the codes of one position: an integer, or one for each of several codebooks."""
    if num_codebooks == 1:
        return index(codes)
    row = tuple(index(code) for code in codes)
    if len(row) != num_codebooks:
        raise ValueError(
            f"this generator takes {num_codebooks} codes for each place, one of each codebook, "
            f"got {len(row)}"
        )
    return row


def _codec_prompt(prompt: Prompt) -> CodecPrompt:
    if not isinstance(prompt, CodecPrompt):
        raise ValueError(f"a generator reads a CodecPrompt, got {type(prompt).__name__}")
    return prompt


def _window_sizes(config: GeneratorConfig, model: GeneratorModel) -> WindowSizes:
    """Return the window in codes, aligned to blocks, so that blocks lie as in the whole utterance.

    A model with a state needs no context: it has seen all codes before, and uses none after.
    """
    window, block = config.generation.window, model.codes_per_block
    is_windowed = model.new_state() is None
    sizes = WindowSizes(
        window.first_blocks * block,
        window.chunk_blocks * block,
        window.growth,
        window.left_blocks * block if is_windowed else 0,
        window.right_blocks * block if is_windowed else 0,
    )
    total = sizes.chunk + sizes.left + sizes.right
    if total > model.max_codes:
        raise ValueError(
            f"the window of {total} codes is wider than the {model.max_codes} codes that "
            f"{config.model!r} takes"
        )
    return sizes
