"""This engine compared with transformers on the same weights, in one process, alternating.

    python benchmarks/engine_cpu.py [--rounds 3] [--requests 16] [--prompt 256] [--generate 64]
        [--model qwen2 | qwen3_moe | qwen3_next]
        [--sides "cache on" ...]

The model is a seeded Qwen2 of about 0.1 B parameters (hidden 768, 12 layers, 12 heads, 4 KV heads,
intermediate 2048, vocabulary 32,000, fp32, tied), or a Qwen3 of 0.3 B with 64 experts of width 256
in each of 12 layers, 8 active per token (hidden 512), or a Qwen3-Next of four layers,
three with eight states of 128 by 128, and four experts in each. Sides:

* ``generate``: transformers, all requests in one padded batch;
* ``continuous``: transformers' continuous batching (skip it with ``--no-continuous``);
* ``cache off``: this engine without prefix caching;
* ``cache on``: this engine, its cache emptied before every run;
* ``no mirror``: as ``cache on``, without mirroring stage outputs: shows the cost of the mirror;
* ``torch only``: as ``cache on``, without the native kernels;
* ``deterministic``: as ``cache on``, with the same bits whatever else is in the batch.

Every round runs every side once, so that a drift of the machine affects all of them. Tokens of all
sides are compared; where they differ, the gap between the two most likely tokens is printed.

A last table shows the cost of caching for a stream that never hits: milliseconds per step inside
the cache's own methods, and their share of the step.

Building an engine raises glibc's malloc thresholds for the whole process, which speeds transformers
up a little too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from benchmarks.models import benchmark_model
from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from engine.requests.request import Request
from prefix_cache import KVCacheManager, StageOutputCache

TokenIds = list[list[int]]


def make_prompts(count: int, length: int, num_shared: int) -> TokenIds:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(1000, 31_000, (num_shared,), generator=generator).tolist()
    return [
        shared + torch.randint(1000, 31_000, (length - num_shared,), generator=generator).tolist()
        for _ in range(count)
    ]


def build_engine(
    checkpoint: str,
    args: argparse.Namespace,
    *,
    caching: bool = True,
    mirror: bool = True,
    attention: Literal["auto", "torch"] = "auto",
    deterministic: bool = False,
) -> LLMEngine:
    return LLMEngine(
        EngineConfig(
            model=checkpoint,
            dtype="float32",
            device="cpu",
            attention_backend=attention,
            deterministic=deterministic,
            block_size=args.block_size,
            max_num_seqs=args.requests,
            max_num_batched_tokens=args.budget,
            max_model_len=args.prompt + args.generate,
            enable_prefix_caching=caching,
        ),
        output_names=None if mirror else (),
    )


ENGINES: dict[str, dict[str, Any]] = {
    "cache off": {"caching": False},
    "cache on": {},
    "no mirror": {"mirror": False},
    "torch only": {"attention": "torch"},
    "deterministic": {"deterministic": True},
}


def engine_side(engine: LLMEngine, num_tokens: int) -> Callable[[TokenIds], TokenIds]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    def run(prompts: TokenIds) -> TokenIds:
        engine.reset_prefix_cache()
        outputs = engine.generate([TokensPrompt(tuple(p)) for p in prompts], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


def generate_side(model: Any, num_tokens: int) -> Callable[[TokenIds], TokenIds]:
    @torch.inference_mode()
    def run(prompts: TokenIds) -> TokenIds:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        rows: TokenIds = out[:, ids.shape[1] :].tolist()
        return rows

    return run


def continuous_side(model: Any, num_tokens: int) -> Callable[[TokenIds], TokenIds]:
    config = GenerationConfig(
        do_sample=False, max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0
    )

    def run(prompts: TokenIds) -> TokenIds:
        results = model.generate_batch(prompts, generation_config=config, progress_bar=False)
        by_id = {key: result.generated_tokens for key, result in results.items()}
        order = sorted(by_id, key=lambda key: int(str(key).rsplit("_", 1)[-1]))
        return [list(by_id[key]) for key in order]

    return run


@torch.inference_mode()
def describe_difference(
    model: Any, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]
) -> str:
    """Describe where two answers diverge, and the gap between the two most likely tokens there."""
    position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if position is None:
        return f"lengths {len(a)} and {len(b)}"
    logits = model(torch.tensor([[*prompt, *a[:position]]])).logits[0, -1]
    top = logits.topk(2).values
    return f"token {position}: top two logits {float(top[0] - top[1]):.1e} apart"


def run_rounds(
    sides: dict[str, Callable[[TokenIds], TokenIds]], prompts: TokenIds, rounds: int
) -> tuple[dict[str, list[float]], dict[str, TokenIds]]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, TokenIds] = {}
    for _ in range(rounds):
        for name, run in sides.items():
            started = time.perf_counter()
            answers[name] = run(prompts)
            seconds[name].append(time.perf_counter() - started)
    return seconds, answers


def report(
    console: Console, title: str, seconds: dict[str, list[float]], baseline: str = "generate"
) -> None:
    table = Table(title=title)
    for column in ("side", "median s", "min s", "max s", f"{baseline} / side"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for name, values in seconds.items():
        ratios = [b / s for b, s in zip(seconds[baseline], values, strict=True)]
        table.add_row(
            name,
            f"{statistics.median(values):.2f}",
            f"{min(values):.2f}",
            f"{max(values):.2f}",
            f"{statistics.median(ratios):.2f}",
        )
    console.print(table)


# Classes and methods of the work that caching adds to a step.
CACHE_METHODS: tuple[tuple[type, str], ...] = (
    (Request, "extend_hashes"),
    (KVCacheManager, "find_cached_prefix"),
    (KVCacheManager, "allocate_slots"),
    (KVCacheManager, "publish"),
    (StageOutputCache, "write"),
)


@contextmanager
def timed(methods: Iterable[tuple[type, str]], seconds: dict[str, float]) -> Iterator[None]:
    """Accumulate the time inside methods; none of them may call another."""
    with ExitStack() as stack:
        for owner, name in methods:
            label = f"{owner.__name__}.{name}"
            method = getattr(owner, name)

            def wrapper(
                *args: Any, _method: Any = method, _label: str = label, **kwargs: Any
            ) -> Any:
                started = time.perf_counter()
                try:
                    return _method(*args, **kwargs)
                finally:
                    seconds[_label] += time.perf_counter() - started

            stack.enter_context(patch.object(owner, name, wrapper))
        yield


def report_equality(console: Console, name: str, num_rows: int, parted: Sequence[str]) -> None:
    """Print how many of a side's answers equal those of generate, and each difference."""
    console.print(
        f"{name}: tokens equal to generate in {num_rows - len(parted)} of {num_rows}"
        + "".join(f"\n    {line}" for line in parted)
    )


def report_cache_cost(
    console: Console, engine: LLMEngine, prompts: TokenIds, num_tokens: int
) -> None:
    seconds: dict[str, float] = defaultdict(float)
    steps_before = engine.stats().num_steps
    started = time.perf_counter()
    with timed(CACHE_METHODS, seconds):
        engine_side(engine, num_tokens)(prompts)
    total = time.perf_counter() - started
    num_steps = engine.stats().num_steps - steps_before
    table = Table(title=f"cost of the cache on a stream with no hits, {num_steps} steps")
    for column in ("method", "ms per step", "share of the step"):
        table.add_column(column, justify="left" if column == "method" else "right")
    rows = [*seconds.items(), ("together", sum(seconds.values()))]
    for name, value in [*rows, ("whole step", total)]:
        table.add_row(name, f"{value / num_steps * 1e3:.3f}", f"{value / total:.2%}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--shared", type=int, nargs="*", default=[0, 192])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-continuous", action="store_true")
    parser.add_argument("--model", default="qwen2")
    parser.add_argument("--sides", nargs="*", default=list(ENGINES), choices=ENGINES)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    checkpoint = benchmark_model(args.model)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    sides = {"generate": generate_side(model, args.generate)}
    if not args.no_continuous:
        sides["continuous"] = continuous_side(model, args.generate)
    sides |= {
        name: engine_side(build_engine(checkpoint, args, **ENGINES[name]), args.generate)
        for name in args.sides
    }
    console = Console()
    for run in sides.values():  # threads, kernels and allocators warm up
        run(make_prompts(2, 32, 0))
    for num_shared in args.shared:
        prompts = make_prompts(args.requests, args.prompt, num_shared)
        seconds, answers = run_rounds(sides, prompts, args.rounds)
        title = (
            f"{args.requests} requests of {args.prompt} + {args.generate} tokens, "
            f"{num_shared} shared, {args.threads} threads"
        )
        report(console, title, seconds)
        for name, rows in answers.items():
            pairs = zip(prompts, answers["generate"], rows, strict=True)
            parted = [describe_difference(model, prompt, a, b) for prompt, a, b in pairs if a != b]
            report_equality(console, name, len(rows), parted)
    prompts = make_prompts(args.requests, args.prompt, 0)
    report_cache_cost(console, build_engine(checkpoint, args), prompts, args.generate)


if __name__ == "__main__":
    main()
