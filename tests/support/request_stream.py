"""Random request streams, and each request's required output whatever else happens.

A stream adds requests with shared prefixes (token ids and embeddings mixed), continues them with
their output so far, as a conversation's next turn does, steps, aborts, pauses, resumes and changes
the token budget of the steps, on a pool so small that blocks are evicted and requests preempted.
A request that finishes must have the output that it has alone in an engine without cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st

from engine import (
    EmbedsPrompt,
    EngineConfig,
    LLMEngine,
    Prompt,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)
from engine.interface.outputs import EngineStats
from tests.support.greedy_reference import NEAR_TIE

BLOCK_SIZE = 4
LONGEST_PROMPT = 80
BUDGETS = (8, 16, 64, 512)


@dataclass(frozen=True)
class Ask:
    """One request of a stream: the first ``length`` tokens of a family, then a tail of its own.

    Followed by what was ``said`` since, by the model and to it; not after embeddings.
    """

    family: int
    length: int
    tail: int
    max_tokens: int
    as_embeds: bool
    seeded: bool
    priority: int
    salt: str | None
    said: tuple[int, ...] = field(default=(), kw_only=True)

    def next_turn(self, output: RequestOutput, number: int) -> Ask:
        """Return the same request and its output, cut at the end or with more appended."""
        reply = output.outputs[0].token_ids
        new = (30 + number,) * (number % 4)
        return replace(self, said=(*self.said, *reply[: len(reply) - number % 5 // 4], *new))

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.seeded else 0.0,
            seed=self.tail if self.seeded else None,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            logprobs=2,
        )

    @property
    def prompt(self) -> Prompt:
        generator = torch.Generator().manual_seed(self.family)
        if self.as_embeds:
            rows = torch.randn(LONGEST_PROMPT, 64, generator=generator)[: self.length]
            tail = torch.full((self.tail % 3, 64), 0.1 * self.tail)
            return EmbedsPrompt(torch.cat([rows, tail]))
        ids = torch.randint(10, 700, (LONGEST_PROMPT,), generator=generator).tolist()
        return TokensPrompt((*ids[: self.length], *[20 + self.tail] * (self.tail % 3), *self.said))


Script = list[tuple[str, Ask | int]]


def scripts(max_prompt: int, budgets: Sequence[int] = BUDGETS) -> st.SearchStrategy[Script]:
    """Draw streams whose prompts have at most ``max_prompt`` tokens before their tails."""
    asks = asks_of(Ask, max_prompt, family=st.integers(0, 2), as_embeds=st.booleans())
    return streams_of(asks, max_size=30, budgets=budgets)


def asks_of(
    kind: type[Ask], max_prompt: int, **fields: st.SearchStrategy[Any]
) -> st.SearchStrategy[Ask]:
    """Draw requests of a kind: of two families and token ids, unless ``fields`` override them."""
    usual: dict[str, st.SearchStrategy[Any]] = {
        "family": st.integers(0, 1),
        "length": st.integers(1, max_prompt),
        "tail": st.integers(0, 5),
        "max_tokens": st.integers(0, 9),
        "as_embeds": st.just(False),
        "seeded": st.booleans(),
        "priority": st.integers(0, 1),
        "salt": st.sampled_from([None, None, None, "other"]),
    }
    return st.builds(kind, **usual | fields)


def streams_of(
    asks: st.SearchStrategy[Ask], *, max_size: int, budgets: Sequence[int] = BUDGETS
) -> st.SearchStrategy[Script]:
    """Draw streams that add such requests and their next turns, step, abort, pause and resume."""
    return st.lists(
        st.one_of(
            st.tuples(st.just("add"), asks),
            st.tuples(st.just("step"), st.integers(1, 3)),
            st.tuples(st.just("turn"), st.integers(0, 40)),
            st.tuples(st.just("abort"), st.integers(0, 30)),
            st.tuples(st.sampled_from(["pause", "pause", "resume"]), st.integers(0, 12)),
            st.tuples(st.just("budget"), st.sampled_from(budgets)),
        ),
        min_size=4,
        max_size=max_size,
    )


def not_done(
    before: EngineStats, after: EngineStats, *, preempts: bool = True, evicts: bool = True
) -> list[str]:
    """List what the run did not do: hit, evict and preempt, including items if there are any."""
    assert before.kv is not None and after.kv is not None
    done = {
        "hit": after.cached_tokens > before.cached_tokens,
        "evict": after.kv.evictions > before.kv.evictions or not evicts,
        "preempt": after.num_preemptions > before.num_preemptions or not preempts,
    }
    if before.kv.items is not None and after.kv.items is not None:
        done["hit items"] = after.encoder_hits > before.encoder_hits
        done["evict items"] = after.kv.items.evictions > before.kv.items.evictions or not evicts
    return [each for each, is_done in done.items() if not is_done]


class Alone:
    """The uncached answers of requests, each computed alone on a pool that holds it.

    Args:
        checkpoint: the model.
        output_names: of the requested tensors; None for all that the model emits.
        atol: absolute error from rounding when a request runs in another batch.
        part: of the model, if the checkpoint holds several.
        rtol: likewise, relative.
        near_tie: a difference of two logits that rounding may reverse.
        **config: further settings of the engine.
    """

    def __init__(
        self,
        checkpoint: str,
        output_names: Collection[str] | None = None,
        atol: float = 1e-5,
        part: str | None = None,
        rtol: float = 0.0,
        near_tie: float = NEAR_TIE,
        **config: Any,
    ) -> None:
        self.atol, self.rtol, self.near_tie = atol, rtol, near_tie
        engine = LLMEngine(
            EngineConfig(
                model=checkpoint,
                part=part,
                block_size=BLOCK_SIZE,
                max_model_len=128,
                num_blocks=256,
                max_num_seqs=1,
                enable_prefix_caching=False,
                **config,
            ),
            output_names=output_names,
        )
        self.answer = cache(lambda ask: engine.generate(ask.prompt, ask.params)[0])


alone_with = cache(Alone)
"""Shared by all tests of a process with the same settings: each answer is computed once."""


def assert_same(
    cached: RequestOutput,
    uncached: RequestOutput,
    atol: float = 1e-5,
    rtol: float = 0.0,
    near_tie: float = NEAR_TIE,
) -> None:
    """Check promise 1; only a near tie, shown by the logits, excuses a difference."""
    for ours, theirs in zip(cached.outputs, uncached.outputs, strict=True):
        if ours.token_ids != theirs.token_ids:
            assert theirs.logprobs is not None
            first = next(
                i
                for i, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
                if a != b
            )
            (_, best), (_, second) = theirs.logprobs[first].top[:2]
            assert best - second < near_tie
            return
        assert ours.finish_reason == theirs.finish_reason
        assert ours.text == theirs.text
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, rows in theirs.tensors.items():
            torch.testing.assert_close(ours.tensors[name], rows, atol=atol, rtol=rtol)


def run_stream(engine: LLMEngine, script: Script, alone: Alone) -> dict[str, RequestOutput]:
    """Run a script; each answer must be the uncached one, and the engine must end up empty."""
    live: dict[str, Ask] = {}
    budget = engine._scheduler._max_num_batched_tokens
    try:
        return _played(engine, script, alone, live)
    finally:
        engine._scheduler._max_num_batched_tokens = budget
        # After a failed script; else the next one would fail because of this one's leftovers.
        for request_id in live:
            engine.abort(request_id)


def _played(
    engine: LLMEngine, script: Script, alone: Alone, live: dict[str, Ask]
) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    streamed: dict[str, str] = {}
    moved: dict[str, tuple[Ask, RequestOutput]] = {}

    def step() -> None:
        for output in engine.step():
            assert output.request_id in live, "an aborted or finished request moved"
            completion = output.outputs[0]
            streamed[output.request_id] = streamed.get(output.request_id, "") + completion.delta
            assert streamed[output.request_id] == completion.text
            moved[output.request_id] = live[output.request_id], output
            if output.finished:
                ask = live.pop(output.request_id)
                done[output.request_id] = output
                assert_same(output, alone.answer(ask), alone.atol, alone.rtol, alone.near_tie)
        engine.check_integrity()

    for number, (event, argument) in enumerate(script):
        if event == "turn" and isinstance(argument, int) and moved:
            before, output = tuple(moved.values())[argument % len(moved)]
            argument = before.next_turn(output, argument)
            length = output.num_prompt_tokens + len(output.outputs[0].token_ids) + 3
            if length + before.max_tokens > engine.max_model_len:
                continue
        if isinstance(argument, Ask):
            request_id = f"r{number}"
            engine.add_request(
                request_id,
                argument.prompt,
                argument.params,
                priority=argument.priority,
                cache_salt=argument.salt,
            )
            live[request_id] = argument
        elif event == "step":
            for _ in range(argument):
                step()
        elif event == "budget":
            engine._scheduler._max_num_batched_tokens = argument
        elif event == "pause":
            engine.pause(f"r{argument}")
        elif event == "resume":
            engine.resume(f"r{argument}")
        elif f"r{argument}" in live:
            engine.abort(f"r{argument}")
            live.pop(f"r{argument}")
            engine.check_integrity()
    for request_id in live:
        engine.resume(request_id)
    while live:
        assert engine.has_unfinished_requests
        step()
    kv = engine.stats().kv
    assert kv is not None
    assert kv.held == 0 and kv.free + kv.cached + 1 == kv.num_blocks
    assert not engine.has_unfinished_requests
    return done
