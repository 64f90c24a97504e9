"""Conversion of sampled tokens to outputs: text, finish reasons, tensors and counters."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.execution.model_runner import ModelRunner, SampledToken
from engine.interface.log_fields import package_logger
from engine.interface.outputs import ROW_KEYS, EngineStats, FinishReason
from engine.interface.placed_error import described
from engine.requests.request import Request, RequestGroup, RequestStatus, Sequel
from engine.scheduling.scheduler import Scheduler, SchedulerOutput
from prefix_cache import KVCacheManager

logger = package_logger(__name__)

_SALT_BYTES, _HASH_BYTES = 16, 32


class RowKeys:
    """Keys for the rows of a prompt, which identify them to the next stage without their content.

    The outputs of a stage for a block of its prompt are determined by the hash of the block and the
    engine, which is identified by a salt. So a stage that consumes rows need not hash them, and
    gets prefix hits even if the rows were recomputed meanwhile and differ in rounding::

        the stage's tokens   | block 0 | block 1 | 2 . . | reply ...
        row_keys               k0 k0 k0  k1 k1 k1  0 0     0          0: to be hashed by content

    Only full blocks of the prompt have keys: later tokens are split into different chunks from run
    to run, and belong to another block in a longer prompt.

    Args:
        salt: 16 bytes, shared only by engines that compute the same rows; None: random.
    """

    def __init__(self, block_size: int, salt: bytes | None = None) -> None:
        self._block_size = block_size
        self._salt = os.urandom(_SALT_BYTES) if salt is None else salt

    def renew(self) -> None:
        """Change the salt, so that future rows get other keys than past ones."""
        self._salt = os.urandom(_SALT_BYTES)

    def of(self, request: Request, start: int, stop: int) -> Tensor:
        """Return ``(stop - start, 6)`` int64 keys of computed tokens; 0 if there is no key."""
        request.extend_hashes(self._block_size)
        num_full = request.num_prompt_tokens // self._block_size
        hashes = b"".join(self._salt + each for each in request.block_hashes[:num_full])
        blocks = np.frombuffer(hashes, np.int64).reshape(-1, (_SALT_BYTES + _HASH_BYTES) // 8)
        keys = np.zeros((stop - start, blocks.shape[1]), np.int64)
        keyed = blocks.repeat(self._block_size, axis=0)[start:stop]
        keys[: len(keyed)] = keyed
        return torch.from_numpy(keys)


@dataclass(slots=True)
class OutputProcessor:
    """Keeps the live requests and processes the results of steps.

    Attributes:
        declared_outputs: required output tensors; a request without one of them fails.
        next_sequence: creates the sequence that continues a finished one.
        row_keys: computes the keys of rows; None if they are not requested.
        groups: live requests by the user's ids, oldest first.
        num_generated_tokens: a counter like ``stats``; separate, since every step adds to it.
        interrupted: requests that an interruption has corrupted.
    """

    scheduler: Scheduler
    model_runner: ModelRunner
    kv_cache_manager: KVCacheManager
    declared_outputs: frozenset[str]
    next_sequence: Callable[[Request, Sequel], Request]
    row_keys: RowKeys | None = None
    groups: dict[str, RequestGroup] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)
    num_generated_tokens: int = 0
    _group_of: dict[str, RequestGroup] = field(default_factory=dict)
    # The requests whose tokens the last call processed. If it is interrupted after that started,
    # they may be partially updated, and their outputs have not reached the caller.
    _processed: tuple[object, Sequence[RequestGroup]] = (None, ())
    interrupted: tuple[RequestGroup, ...] = ()
    # True while blocks change owners: errors raised then do not concern a single request.
    _moves_blocks: bool = False

    def add(self, group: RequestGroup) -> None:
        """Register a live request."""
        self.groups[group.request_id] = group
        for completion in group.completions:
            self._group_of[completion.request.request_id] = group

    def live(self, request_id: str) -> list[Request]:
        """Return the unfinished sequences of a request; empty if it is not live."""
        group = self.groups.get(request_id)
        if group is None:
            return []
        return [each.request for each in group.completions if each.finish_reason is None]

    def abort(self, request_id: str) -> None:
        """Drop a request and free its resources; an unknown id is ignored."""
        for request in self.live(request_id):
            self._publish_partial(request)
            self._release(request)
        if request_id in self.groups:
            self._remove(self.groups[request_id])
        # Do not end it a second time, especially if its id is reused by then.
        self.interrupted = tuple(x for x in self.interrupted if x.request_id != request_id)

    def count_first_run(self, scheduled: SchedulerOutput) -> None:
        """Count the requests and encoder runs that start with a step, before it runs."""
        for item in scheduled.scheduled:
            request = item.request
            if item.runs_encoder:
                self.stats = self.stats.plus(encoder_runs=1)
            if request.times.first_scheduled is None:
                request.times.first_scheduled = time.monotonic()
                is_known = request.encoder_input is not None and not item.runs_encoder
                self.stats = self.stats.plus(
                    prompt_tokens=request.num_prompt_tokens,
                    cached_tokens=request.num_cached_tokens or 0,
                    encoder_hits=int(is_known),
                )

    def process(
        self, scheduled: SchedulerOutput, sampled: Sequence[SampledToken], call: object
    ) -> list[RequestGroup]:
        """Process a step that ``call`` has run, see :meth:`restart`; return requests with news."""
        groups = [self._group_of[item.request.request_id] for item in scheduled.scheduled]
        self._processed = call, groups
        updated: dict[str, RequestGroup] = {}
        for token in sampled:
            group = self._group_of[token.request.request_id]
            if token.judgement is not None:
                token.request.judgements.append(token.judgement)
            if token.token_id is not None and token.request.prompt_choice is not None:
                self._complete_prompt(group, token.request, token.token_id)
                continue
            updated[group.request_id] = group
            if token.token_id is None:
                group.error = token.error
                continue
            self.num_generated_tokens += 1
            try:
                self._append_token(group, token, token.token_id)
            except Exception as error:  # for example of a tokenizer: fails only this request
                if self._moves_blocks:
                    raise
                logger.exception(
                    "request %s failed", group.request_id, extra={"request_id": group.request_id}
                )
                group.error = f"the token could not be taken: {described(error)}"
        for item, group in zip(scheduled.scheduled, groups, strict=True):
            request = item.request
            if (
                request.params.max_tokens == 0
                and request.num_computed_tokens == request.num_tokens
                and group.error is None
                and request.status is RequestStatus.RUNNING
            ):
                updated[group.request_id] = group
                self._finish(group, request, FinishReason.LENGTH)
        for group in updated.values():
            if group.error is not None:
                self._fail(group, group.error)
            elif group.finished:
                self._remove(group)
        return list(updated.values())

    def restart(self, call: object) -> None:
        """Restart every live request after ``call`` was interrupted at any point.

        Requests whose tokens it was processing may be partially updated: :meth:`fail_interrupted`
        fails them.
        """
        self._moves_blocks = False
        mark, groups = self._processed
        corrupted = (*self.interrupted, *groups) if mark is call else self.interrupted
        self.interrupted = tuple({group.request_id: group for group in corrupted}.values())
        self.scheduler.clear()
        self.model_runner.clear()
        for group in self.interrupted:
            self.groups[group.request_id] = group
        self._group_of = {}
        for group in self.groups.values():
            self.add(group)
            for request in self.live(group.request_id):
                request.restart()
                self.scheduler.add(request)

    def fail_interrupted(self, call: object) -> list[RequestGroup]:
        """Fail the requests that an interruption has corrupted."""
        self._processed = call, self.interrupted
        self.interrupted = ()
        message = "the step was interrupted while its tokens were taken in"
        return [self._fail(group, message) for group in self._processed[1]]

    def fail(self, requests: Iterable[Request], error: str, call: object) -> list[RequestGroup]:
        """Fail the requests of these sequences with an error."""
        self._processed = call, tuple(self._group_of[each.request_id] for each in requests)
        return [self._fail(group, error) for group in self._processed[1]]

    def _complete_prompt(self, group: RequestGroup, request: Request, token_id: int) -> None:
        """Complete the prompt with the token that the model chose for it; emits no output."""
        choice, completion = request.prompt_choice, group.completion_of(request)
        new = request.complete_prompt(token_id)
        if choice is not None and choice.is_alone and completion.ended is not None:
            self._release(request)
            sequel = Sequel(0, None, request.encoder_input, request.continuation)
            self._continue_with(group, request, sequel)
            completion.ended.first = completion.request
            return
        self.stats = self.stats.plus(prompt_tokens=len(new))
        for each in new:
            self.model_runner.append_token(request, each)

    def _append_token(self, group: RequestGroup, token: SampledToken, token_id: int) -> None:
        """Append one sampled token; finish the completion if it is the last."""
        request = token.request
        request.append(token_id, token.logprobs, token.codes)
        if request.times.first_token is None:
            request.times.first_token = time.monotonic()
        reason = request.text.append(token_id)
        if reason is None and request.num_tokens >= request.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is None and _is_repeating(request):
            reason = FinishReason.LENGTH
        if reason is None:
            self.model_runner.append_token(request, token_id)
        else:
            self._finish(group, request, reason)

    def _finish(self, group: RequestGroup, request: Request, reason: FinishReason) -> None:
        """Finish a completion: gather all its rows by its block table, then free its blocks."""
        rows = self.kv_cache_manager.gather_outputs(request.request_id, request.num_computed_tokens)
        if self.row_keys is not None:
            rows[ROW_KEYS] = self.row_keys.of(request, 0, request.num_computed_tokens)
        if reason is FinishReason.LENGTH:
            # An end token has no such row.
            drawn = self.model_runner.drawn_rows(request)
            for name in rows.keys() & drawn.keys():
                rows[name] = torch.cat((rows[name], drawn[name].to(rows[name])))
        # A text-only prompt has no encoder tokens, and so no encoder rows.
        encoder = request.encoder_blocks
        encoder_rows = self.kv_cache_manager.outputs.gather_encoder(
            request.request_id, encoder.num_tokens if encoder is not None else 0
        )
        tensors: Mapping[str, Tensor] = rows | encoder_rows
        missing = self.declared_outputs - tensors.keys()
        if missing:
            group.error = f"the model did not emit {', '.join(sorted(missing))} for every token"
        self._moves_blocks = True
        if not missing:
            self._publish_partial(request)
        continuation, ended = request.continuation, group.completion_of(request).ended
        attention = self.model_runner.alignment(request)
        self._release(request)
        self._moves_blocks = False
        if continuation is not None and ended is not None:
            sequel = continuation.follow(request, reason, attention)
            if sequel.window is not None:
                ended.take_in(request, sequel.num_kept, sequel.window, rows, encoder_rows)
            if sequel.encoder_input is not None and group.error is None:
                self._continue_with(group, request, sequel)
                return
            tensors = ended.tensors()
        group.finish(request, reason, tensors)

    def _continue_with(self, group: RequestGroup, request: Request, sequel: Sequel) -> None:
        """Continue a completion with another sequence, under the same id and index."""
        following = self.next_sequence(request, sequel)
        group.completion_of(request).request = following
        self.scheduler.add(following)

    def _publish_partial(self, request: Request) -> None:
        """Publish the partial last block, so that the next turn of a conversation can hit it."""
        if request.status is not RequestStatus.RUNNING:
            return  # it holds no blocks
        if self.kv_cache_manager.enable_prefix_caching and self.model_runner.is_finite(request):
            self.scheduler.publish_partial(request)

    def _release(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.model_runner.forget(request)

    def _fail(self, group: RequestGroup, error: str) -> RequestGroup:
        """End every completion of a request with an error; other requests continue."""
        group.error = error
        for request in self.live(group.request_id):
            self._release(request)
            group.finish(request, FinishReason.ERROR, {})
        group.finished = True  # an interruption may have come after the last finish_reason
        self._remove(group)
        return group

    def _remove(self, group: RequestGroup) -> None:
        self.groups.pop(group.request_id, None)
        for completion in group.completions:
            self._group_of.pop(completion.request.request_id, None)


_MAX_LOOP_LENGTH = 20
"""Maximum length in tokens of a detected repetition."""


def _is_repeating(request: Request) -> bool:
    """Return True if the last tokens repeat more often in a row than the parameters allow."""
    max_repeats, token_ids = request.params.max_repeats, request.token_ids
    if max_repeats is None:
        return False
    longest = (len(token_ids) - request.num_prompt_tokens) // (max_repeats + 1)
    for length in range(1, min(_MAX_LOOP_LENGTH, longest) + 1):
        last = token_ids[-length * (max_repeats + 1) :]
        if last[length:] == last[:-length]:
            return True
    return False
