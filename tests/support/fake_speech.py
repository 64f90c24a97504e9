"""Stages without a model that think and speak, in chunks or whole, with few slots.

Their output depends on their input alone, token by token, so that a run with chunks can be
compared with one without.
"""

from __future__ import annotations

import hashlib
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engine import ChatPrompt, CodecPrompt, FinishReason, Prompt, SpeechPrompt, Waveform
from stages import Stage, StageInputs, StageOutput, StageRequest, StageStats


@dataclass(slots=True)
class _Run:
    """One request in a stage: its input and output."""

    request: StageRequest
    prompt: list[int]
    units: list[int]
    is_last: bool
    tokens: list[int] = field(default_factory=list)
    work: int = 0
    paused: bool = False


class FakeSpeechStage(Stage):
    """Makes one token per unit of its input, and ``tail`` more after the last.

    Args:
        name: of the stage.
        source: the stage that feeds it, by ``transform``; None for a root.
        transform: of its input.
        chunk_size: of the edge.
        max_pending: of the edge.
        seats: requests that run at a time; one that is paused or waits for input keeps its seat.
        rotate: steps after which the oldest one moves to the end of the queue, as if preempted.
        steps_per_token: number of steps per token.
        tail: tokens after the last unit.
        limit: number of tokens after which a request ends with reason length.
        fail: ids that end with an error, with the number of tokens after which they do.
        explode: ids for which ``step`` raises, with the number of tokens as well.
        refuse: ids that are refused, with the number of chunks that are accepted before.
        endless: ids that continue after their last token until they are aborted.
        hide_rows: every n-th call of ``partial_tensors`` finds nothing.
        final_output: what the user gets.
        speakers: value of the stage's property.

    Attributes:
        is_held: checked before every step by the driver of the stage; while it is true, the stage
            steps without making progress.
    """

    makes: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        source: str | tuple[str, ...] = (),
        transform: Any = "",
        *,
        chunk_size: int | None = None,
        max_pending: int = 2,
        seats: int = 9,
        rotate: int | None = None,
        steps_per_token: int = 1,
        tail: int = 1,
        limit: int = 1000,
        fail: Mapping[str, int] | None = None,
        explode: Mapping[str, int] | None = None,
        refuse: Mapping[str, int] | None = None,
        endless: Collection[str] = (),
        hide_rows: int | None = None,
        final_output: Collection[str] = ("text",),
        outputs: Collection[str] | None = None,
        speakers: tuple[str, ...] | None = None,
    ) -> None:
        sources = (source,) if isinstance(source, str) else source
        super().__init__(
            name,
            inputs=StageInputs(sources, transform, chunk_size, max_pending) if sources else None,
            outputs=self.makes if outputs is None else outputs,
            final_output=final_output,
        )
        self.seats, self.rotate, self.steps_per_token = seats, rotate, steps_per_token
        self.tail, self.limit = tail, limit
        self.fail, self.explode, self.refuse = fail or {}, explode or {}, refuse or {}
        self.endless, self.hide_rows = endless, hide_rows
        self.live: dict[str, _Run] = {}
        self.received: dict[str, list[Prompt]] = {}
        self.pauses = 0
        self.num_steps = self._num_held_steps = 0
        self.is_working = False
        self.is_held: Callable[[], bool] = lambda: False
        self._partial_calls = 0
        self._speakers = speakers

    @property
    def takes_chunks(self) -> bool:
        return self.inputs is not None

    @property
    def gives_chunks(self) -> bool:
        return True

    @property
    def speakers(self) -> tuple[str, ...] | None:
        return self._speakers

    @abstractmethod
    def read(self, prompt: Prompt) -> tuple[Sequence[int], Sequence[int], bool]:
        """Return a prompt's own units, the units of tokens, and True if it is the last."""

    def add_request(self, request: StageRequest) -> None:
        self._receive(request.request_id, request.prompt)
        assert request.request_id not in self.live
        prompt, units, is_last = self.read(request.prompt)
        self.live[request.request_id] = _Run(request, list(prompt), list(units), is_last)

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        run = self.live[request_id]
        assert self.needs_input(request_id), "chunks are handed in when they are needed"
        assert not run.is_last
        self._receive(request_id, prompt)
        more, units, run.is_last = self.read(prompt)
        assert not more, "only the first chunk has a prompt of its own"
        run.units += units

    def _receive(self, request_id: str, prompt: Prompt) -> None:
        seen = self.received.setdefault(request_id, [])
        if self.refuse.get(request_id) == len(seen):
            raise ValueError("refused")
        seen.append(prompt)

    def needs_input(self, request_id: str) -> bool:
        run = self.live[request_id]
        return not run.is_last and len(run.tokens) >= len(run.units)

    def partial_tensors(self, request_id: str, first_row: int) -> Mapping[str, Tensor]:
        self._partial_calls += 1
        if self.hide_rows is not None and self._partial_calls % self.hide_rows == 0:
            return {}
        return {name: rows[first_row:] for name, rows in self._rows(request_id).items()}

    def pause_request(self, request_id: str) -> None:
        self.pauses += 1
        self.live[request_id].paused = True

    def resume_request(self, request_id: str) -> None:
        if request_id in self.live:
            self.live[request_id].paused = False

    def step(self) -> list[StageOutput]:
        self.is_working = True
        try:
            return self._step()
        finally:
            self.is_working = False

    def _step(self) -> list[StageOutput]:
        if self.live and self.is_held():
            self._num_held_steps += 1
            time.sleep(0.0005)  # lets others, in their own threads, make progress first
            return []
        seated = list(self.live)[: self.seats]
        able = [id_ for id_ in seated if not (self.live[id_].paused or self.needs_input(id_))]
        if any(len(self.live[id_].tokens) >= self.explode.get(id_, 10**9) for id_ in able):
            raise ArithmeticError("boom")
        if able:
            self._count_step()
        return [output for id_ in able if (output := self._work(id_)) is not None]

    def _count_step(self) -> None:
        self.num_steps += 1
        if self.rotate is not None and self.num_steps % self.rotate == 0:
            oldest = next(iter(self.live))
            self.live[oldest] = self.live.pop(oldest)

    def _work(self, request_id: str) -> StageOutput | None:
        run = self.live[request_id]
        run.work += 1
        if run.work % self.steps_per_token:
            return None
        before = len(run.tokens)
        # A last chunk may contain nothing but the flag that it is the last.
        length = len(run.units) + (10**9 if request_id in self.endless else self.tail)
        if not run.is_last or before < length:
            known = run.prompt + run.units[: before + 1]
            run.tokens.append(hashlib.sha256(repr((known, before)).encode()).digest()[0])
        ended = run.is_last and len(run.tokens) >= length
        failed = len(run.tokens) >= self.fail.get(request_id, 10**9)
        finished = ended or failed or len(run.tokens) >= self.limit
        reason = FinishReason.STOP if ended else FinishReason.LENGTH
        output = StageOutput(
            request_id=request_id,
            stage=self.name,
            finished=finished,
            token_ids=tuple(run.tokens),
            finish_reason=(FinishReason.ERROR if failed else reason) if finished else None,
            error="told to fail" if failed else None,
            num_prompt_tokens=len(run.prompt),
            tensors=self._rows(request_id) if finished else {},
        )
        output = self.dress(output, run.tokens, before)
        if finished:
            del self.live[request_id]
        return output

    def dress(self, output: StageOutput, tokens: Sequence[int], before: int) -> StageOutput:
        """Add this kind of stage's data for its tokens; the first ``before`` were there already."""
        return replace(output, text=_letters(tokens), delta=_letters(tokens[before:]))

    def _rows(self, request_id: str) -> dict[str, Tensor]:
        run = self.live[request_id]
        ran = torch.tensor(run.prompt + run.tokens[:-1], dtype=torch.float32)
        places = torch.arange(len(ran))
        made = {
            "hidden_states": ran[:, None] * torch.tensor([1.0, 2.0]),
            "token_embeds": (ran + places)[:, None].expand(-1, 2),
            "position_ids": (places[:, None] // 2).expand(-1, 3),
        }
        return {name: made[name] for name in self.outputs or ()}

    def abort(self, request_id: str) -> None:
        self.live.pop(request_id, None)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    @property
    def enable_prefix_caching(self) -> bool:
        return False

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value: bool) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        assert not self.live, "a stage is reset only while it is idle"

    def stats(self) -> StageStats:
        return StageStats(num_steps=self.num_steps + self._num_held_steps)

    def describe(self) -> Mapping[str, Any]:
        return {}

    def check_integrity(self) -> None:
        assert not self.live, f"{self.name} still holds {list(self.live)}"

    def close(self) -> None:
        pass


class Thinker(FakeSpeechStage):
    """Text in, text and rows out."""

    makes = ("hidden_states", "token_embeds", "position_ids")

    def read(self, prompt: Prompt) -> tuple[Sequence[int], Sequence[int], bool]:
        if isinstance(prompt, ChatPrompt):
            prompt = "".join(message["content"] for message in prompt.messages)
        assert isinstance(prompt, str)
        return list(prompt.encode()), list(prompt.encode()), True


class Talker(FakeSpeechStage):
    """Rows in, codes out."""

    def read(self, prompt: Prompt) -> tuple[Sequence[int], Sequence[int], bool]:
        assert isinstance(prompt, SpeechPrompt)
        own = [int(unit) for unit in prompt.prompt_rows.sum(dim=1)]
        if prompt.positions is not None:
            own += [int(place) for place in prompt.positions.sum(dim=0)]
        own += prompt.speaker.encode() if prompt.speaker is not None and own else b""
        return own, [int(unit) for unit in prompt.reply_rows.sum(dim=1)], prompt.is_last


class Vocoder(FakeSpeechStage):
    """Codes in, sound out: a fixed number of samples per token, sent as they come."""

    def read(self, prompt: Prompt) -> tuple[Sequence[Any], Sequence[Any], bool]:
        assert isinstance(prompt, CodecPrompt)
        return (), [code for code in prompt.codes if isinstance(code, int)], prompt.is_last

    def dress(self, output: StageOutput, tokens: Sequence[int], before: int) -> StageOutput:
        whole = _sound(tokens) if output.finished and output.error is None else None
        delta = _sound(tokens[before:]) if len(tokens) > before else None
        return replace(output, token_ids=(), audio=whole, audio_delta=delta)


def _letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def _sound(tokens: Sequence[int]) -> Waveform:
    return Waveform(torch.tensor(tokens, dtype=torch.float32).repeat_interleave(3) / 256, 24_000)
