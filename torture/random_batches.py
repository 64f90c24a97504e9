"""Random requests in one engine, compared with the same requests alone and uncached.

    python -m torture.random_batches [--requests 2000] [--poisoned 0.1] [--only qwen2 jamba ...]

Requests that share prefixes are added, paused, aborted, preempted and evicted, in a small pool.
Some contain a token whose embedding is NaN: those must fail without affecting others. Every other
one must have the same output as alone: tokens, text, and every row of its tensors.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
from dataclasses import replace
from typing import Literal, get_args

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from engine import EngineConfig, LLMEngine, RequestOutput, TokensPrompt
from omni.seeded.checkpoints import SEEDED_PREFIX, resolve_model
from prefix_cache import IntegrityError
from tests.support.poisoned_tokens import POISON, poison_embeddings
from tests.support.request_stream import BLOCK_SIZE, Alone, Ask, assert_same
from torture.outcome_table import Tally

# Pool sizes in blocks: a few requests fill the pool, and the longest still fits.
POOLS = {"qwen2": 20, "gemma2": 36, "mistral-sliding": 30, "jamba": 8, "bamba": 8, "bart": 34}
Backend = Literal["auto", "torch"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
LONGEST = 24
MAX_STEPS = 5000


class Stream:
    """One engine, its live requests, and the outcomes of those that ended."""

    def __init__(self, name: str, backend: Backend, checkpoint: str, draw: random.Random) -> None:
        self.tally = Tally(f"{name}, {backend} attention: random requests")
        self.draw = draw
        self.alone = Alone(checkpoint, atol=5e-5)
        self.engine = LLMEngine(
            EngineConfig(
                model=checkpoint,
                block_size=BLOCK_SIZE,
                num_blocks=POOLS[name],
                max_num_seqs=4,
                max_num_batched_tokens=draw.choice([16, 40]),
                max_model_len=60,
                preemption=draw.choice(["recompute", "swap"]),
                attention_backend=backend,
            )
        )
        poison_embeddings(self.engine, pytest.MonkeyPatch())
        self.live: dict[str, tuple[Ask, bool]] = {}
        self.num_added = 0

    def run(self, num_requests: int, poisoned: float) -> None:
        """Add ``num_requests``, and step until all have ended."""
        steps = 0
        while self.num_added < num_requests or self.live:
            for _ in range(self.draw.randint(0, 3)):
                if self.num_added < num_requests:
                    self.add(self.draw.random() < poisoned)
            if self.live and self.draw.random() < 0.02:
                request_id = self.draw.choice(list(self.live))
                self.engine.abort(request_id)
                del self.live[request_id]
                self.tally.add("went on")
            self.pause_or_resume(may_pause=self.num_added < num_requests)
            steps = steps + 1 if self.num_added == num_requests else 0
            if steps > MAX_STEPS:
                self.tally.add("hangs", f"{list(self.live)} are live")
                return
            if not self.step():
                return

    def pause_or_resume(self, *, may_pause: bool) -> None:
        """Pause some requests, which frees their blocks for others; in the end resume all."""
        for request_id in self.live:
            if may_pause and self.draw.random() < 0.03:
                self.engine.pause(request_id)
            elif not may_pause or self.draw.random() < 0.1:
                self.engine.resume(request_id)

    def add(self, is_poisoned: bool) -> None:
        """Add a random request."""
        draw = self.draw
        ask = Ask(
            family=draw.randint(0, 2),
            length=draw.randint(1, LONGEST),
            tail=draw.randint(0, 5),
            max_tokens=draw.randint(0, 9),
            as_embeds=False,
            seeded=draw.random() < 0.3,
            priority=draw.randint(0, 1),
            salt=draw.choice([None, None, None, "other"]),
        )
        prompt = ask.prompt
        assert isinstance(prompt, TokensPrompt)
        if is_poisoned:
            ids = list(prompt.prompt_token_ids)
            ids.insert(draw.randint(len(ids) // 2, len(ids)), POISON)
            prompt = replace(prompt, prompt_token_ids=tuple(ids))
        request_id = f"r{self.num_added}"
        self.num_added += 1
        self.live[request_id] = ask, is_poisoned
        self.engine.add_request(
            request_id, prompt, ask.params, priority=ask.priority, cache_salt=ask.salt
        )

    def step(self) -> bool:
        """Run one step; return False if the engine is broken."""
        try:
            outputs = self.engine.step()
            self.engine.check_integrity()
        except IntegrityError as error:
            self.tally.add("silently broken", str(error))
            return False
        except Exception as error:
            self.tally.add("silently broken", f"{type(error).__name__}: {error}")
            return False
        for output in outputs:
            if output.finished:
                self.judge(output, *self.live.pop(output.request_id))
        return True

    def judge(self, output: RequestOutput, ask: Ask, is_poisoned: bool) -> None:
        """Count the outcome of a request that has ended."""
        # Its generated tokens may be poison too, except for the last, which is not computed.
        if is_poisoned or POISON in self.alone.answer(ask).outputs[0].token_ids[:-1]:
            has_failed = output.error is not None and "NaN or infinite" in output.error
            self.tally.add("failed alone" if has_failed else "wrong", f"{ask}: {output.error}")
            return
        try:
            assert output.error is None, output.error
            assert_same(output, self.alone.answer(ask), self.alone.atol)
        except AssertionError as error:
            self.tally.add("wrong", f"{ask}: {error}"[:300])
        else:
            self.tally.add("went on")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=700, help="per model and backend")
    parser.add_argument("--poisoned", type=float, default=0.1, help="share that holds NaN")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=POOLS, default=list(POOLS), metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    tallies = []
    for name in args.only:
        for backend in BACKENDS:
            checkpoint = resolve_model(SEEDED_PREFIX + name)
            stream = Stream(
                name, backend, checkpoint, random.Random(f"{name} {backend} {args.seed}")
            )
            stream.run(args.requests, args.poisoned)
            tallies.append(stream.tally)
            print(stream.tally.row(), file=sys.stderr, flush=True)
    return Tally.report(tallies)


if __name__ == "__main__":
    sys.exit(main())
