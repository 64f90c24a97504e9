"""Formats of weights and pages compared on a CPU, in one process, alternating.

    python benchmarks/formats_cpu.py [--rounds 5] [--requests 1 4] [--threads 1 --clock cpu]

The model is that of ``engine_cpu.py``, of about 0.1 B parameters. Each round prefills and decodes
the same prompts once in every format. ``decode`` is the median time of a step with all requests,
``prefill`` that of the step that computes their prompts, ``job`` the total; the ratios are those of
float32's time to the format's, as medians over rounds. Bytes are those reported by the engine. With
one thread, the process's CPU time (``--clock cpu``) excludes the effect of other programs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_cpu import TokenIds, make_prompts
from benchmarks.models import benchmark_model
from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from engine.resources.memory_plan import format_bytes

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4, bfloat16": {"quantization": "int4", "dtype": "bfloat16"},
}
PARTS = ("prefill", "decode", "job")


def run_once(
    engine: LLMEngine, prompts: TokenIds, num_tokens: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Measure seconds of the first step, the median later one, and in total."""
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), TokensPrompt(tuple(prompt)), params)
    steps = []
    while engine.has_unfinished_requests:
        started = clock()
        engine.step()
        steps.append(clock() - started)
    return {"prefill": steps[0], "decode": statistics.median(steps[1:]), "job": sum(steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    torch.set_num_threads(args.threads)
    checkpoint = benchmark_model("qwen2")
    shape = {"max_num_seqs": 16, "max_num_batched_tokens": 16 * args.prompt, "num_blocks": 512}
    engines = {
        name: LLMEngine(EngineConfig(model=checkpoint, device="cpu", **shape, **config))
        for name, config in FORMATS.items()
    }
    console = Console(width=110)
    for count in args.requests:
        prompts = make_prompts(count, args.prompt, 0)
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        for number in range(args.rounds + 1):  # the first one warms up
            for name, engine in engines.items():
                for part, value in run_once(engine, prompts, args.generate, clock).items():
                    if number:
                        seconds[name, part].append(value)
        tokens = f"{args.prompt} + {args.generate} tokens"
        title = f"{count} requests of {tokens}, {args.threads} threads, {args.clock} time"
        table = Table(title=title)
        for column in ("format", "weights", "pages", *(f"{part} ms, ratio" for part in PARTS)):
            table.add_column(column, justify="left" if column == "format" else "right")
        for name, engine in engines.items():
            plan = engine.memory_plan
            cells = [format_bytes(plan.weights_bytes), format_bytes(plan.kv_cache_bytes)]
            for part in PARTS:
                pairs = zip(seconds["float32", part], seconds[name, part], strict=True)
                ratio = statistics.median(theirs / ours for theirs, ours in pairs)
                cells.append(f"{statistics.median(seconds[name, part]) * 1e3:.1f}  {ratio:.2f}")
            table.add_row(name, *cells)
        console.print(table)


if __name__ == "__main__":
    main()
