"""Fault injection into workers: every request must end with the same output as without faults.

    python -m benchmarks.chaos [--config omni_speech] [--requests 2000] [--faults 100] [--seed 0]
    python -m benchmarks.chaos --runtime ray --faults 10 --kinds sigkill
    python -m benchmarks.chaos --exact
    python -m benchmarks.chaos --shared

Several callers stream requests through a pipeline in processes, or in the actors of a Ray cluster,
while its workers get SIGKILL, SIGSTOP, exceptions in the middle of their steps, and exceptions that
break a stage permanently, spread evenly over the requests. Every output is compared with that of
the same prompt without faults and inline. Token ids, texts, finish reasons and lengths must be
equal, and deltas must add up to the whole. Tensors and audio may differ by 1e-5, a third of a
step of 16-bit samples: a retried request has other requests in its batches and cache entries, and
floating point sums in another order differ by some 2e-7. With ``--exact`` each stage runs one
request at a time, with one thread and without a cache: then sums have a fixed order, and audio must
be equal to the last bit. With ``--shared`` all stages share one worker.

Periodically, and at the end, every worker checks the integrity of its cache. Counted before and
after: processes, threads, descriptors, and names in /dev/shm.

Retries are practically unlimited: with few requests many faults hit the same one.
``tests/omni/runtime/test_chaos.py`` runs a small part of it, compared with outputs of the workers
without faults (``--reference workers``), which takes less time to build.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.disturber import EXCEPTION, RUIN, Disturber, Outcome, check
from benchmarks.faulty_stages import faulty
from benchmarks.leftovers import Leftovers
from benchmarks.undisturbed import Undisturbed
from omni import Omni, OmniOutput, OmniRequest
from omni.pipelines.pipeline_config import PipelineConfig

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "rivers", "run")
_SHORT = {
    "stages.thinker.sampling.max_tokens": 12,
    "stages.talker.sampling.max_tokens": 20,
    "stages.code2wav.generation.num_steps": 2,
}
"""Overrides with which thousands of requests of the default pipeline end within minutes."""

_ALONE: dict[str, dict[str, Any]] = {
    "autoregressive": {"engine.max_num_seqs": 1, "engine.enable_prefix_caching": False},
    "generator": {"engine.max_batch_size": 1},
}
"""Overrides by kind of stage with which each request's sums do not depend on other requests."""

_CALLERS, _AT_ONCE = 4, 4
_DIFFERENT = 160
_ALLOWED = 1e-5
_FAULTS = ("SIGKILL", "SIGKILL", EXCEPTION, RUIN, "SIGSTOP")
_KINDS = {kind.lower(): kind for kind in _FAULTS}


def prompts(count: int, seed: int) -> list[str]:
    """Generate prompts, many of which share a prefix."""
    rng = random.Random(seed)
    beginnings = [" ".join(rng.choices(_WORDS, k=6)) for _ in range(8)]
    different = [
        f"{rng.choice(beginnings)} {' '.join(rng.choices(_WORDS, k=3))}" for _ in range(_DIFFERENT)
    ]
    return rng.choices(different, k=count)


def run(
    omni: Omni,
    asked: Sequence[str],
    expected: Undisturbed,
    seen: Outcome,
    disturber: Disturber | None = None,
) -> None:
    """Stream all requests, by several callers at once, and compare their outputs."""
    counting = threading.Lock()
    # With few requests a caller sends few at once, or most would run before the first fault.
    at_once = max(1, min(_AT_ONCE, len(asked) // (8 * _CALLERS)))

    def call(start: int) -> None:
        if disturber is not None:
            disturber.keep_pace()
        for outputs in streamed(omni, asked[start : start + at_once], start):
            last = outputs[-1]
            prompt = asked[int(last.request_id.removeprefix("r"))]
            with counting:
                if last.error is not None:
                    seen.kinds["failed"] += 1
                    seen.errors[last.error] += 1
                else:
                    where = expected.difference(prompt, outputs)
                    seen.kinds["equal" if where is None else f"differs in {where}"] += 1

    with ThreadPoolExecutor(_CALLERS) as callers:
        for done in [callers.submit(call, at) for at in range(0, len(asked), at_once)]:
            done.result()


def streamed(omni: Omni, asked: Sequence[str], start: int) -> Iterator[list[OmniOutput]]:
    """Yield the outputs of each request when it ends."""
    batch = [OmniRequest(prompt, f"r{start + at}") for at, prompt in enumerate(asked)]
    outputs: dict[str, list[OmniOutput]] = {str(each.request_id): [] for each in batch}
    for output in omni.stream(batch):
        outputs[output.request_id].append(output)
        if output.finished:
            yield outputs.pop(output.request_id)


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", default="omni_speech")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=sorted(_KINDS), help="of faults; else all")
    parser.add_argument("--runtime", choices=("processes", "ray"), default="processes")
    parser.add_argument("--reference", choices=("inline", "workers"), default="inline")
    parser.add_argument("--exact", action="store_true", help="equal to the last bit")
    parser.add_argument("--shared", action="store_true", help="all stages in one worker")
    return parser.parse_args(words)


def overrides_of(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the overrides of the pipeline: those inline, and the additional ones in workers."""
    inline = dict(_SHORT if arguments.config == "omni_speech" else {})
    workers = {
        "runtime.kind": arguments.runtime,
        "runtime.max_retries": 1000,
        "runtime.stall_timeout_s": 2.0,
    }
    if arguments.shared:
        for name in PipelineConfig.load(arguments.config).stages:
            workers[f"stages.{name}.placement.worker"] = "all"
    if arguments.exact:
        for name, stage in PipelineConfig.load(arguments.config).stages.items():
            alone = _ALONE[stage.kind]
            inline |= {f"stages.{name}.{place}": value for place, value in alone.items()}
            workers[f"stages.{name}.placement.threads"] = 1
    return inline, workers


def faults_of(arguments: argparse.Namespace) -> list[str]:
    """Return the faults, equally many of each kind, in an order determined by the seed."""
    kinds = [_KINDS[kind] for kind in arguments.kinds] if arguments.kinds else _FAULTS
    faults = [kinds[number % len(kinds)] for number in range(arguments.faults)]
    random.Random(arguments.seed).shuffle(faults)
    return faults


def undisturbed(
    arguments: argparse.Namespace, asked: Sequence[str], inline: PipelineConfig, config: Any
) -> Undisturbed:
    """Run every prompt without faults; also starts the process that workers are forked from."""
    different = list(dict.fromkeys(asked))
    with Omni(config) as omni:
        outputs = omni.generate(different if arguments.reference == "workers" else different[:1])
    if arguments.reference == "inline":
        with Omni(inline) as omni:
            outputs = omni.generate(different)
    said = dict(zip(different, outputs, strict=True))
    return Undisturbed(said, 0.0 if arguments.exact else _ALLOWED)


def main(words: Sequence[str] | None = None) -> int:
    """Run from the command line; return 0 if all outputs are equal and nothing was leaked."""
    arguments = arguments_of(words)
    asked, faults = prompts(arguments.requests, arguments.seed), faults_of(arguments)
    plain, in_workers = overrides_of(arguments)
    if arguments.exact:
        torch.set_num_threads(1)
    inline = PipelineConfig.load(arguments.config, plain)
    config = faulty(PipelineConfig.load(arguments.config, plain | in_workers))
    expected = undisturbed(arguments, asked, inline, config)
    before = Leftovers.now()
    seen, again, began = Outcome(), Outcome(), time.monotonic()
    with Omni(config) as omni:
        with Disturber(omni, faults, arguments.requests, seen, arguments.seed) as disturber:
            run(omni, asked, expected, seen, disturber)
        run(omni, asked[:1], expected, again)  # until every worker is up again
        check(omni, again)
        num_stages = len(omni.pipeline.order)
    # Ray leaks one or two closed sockets of every cluster that a process has joined, even if only
    # ray.init and ray.shutdown were called.
    spared = 2 if arguments.runtime == "ray" else 0
    after = Leftovers.settled(before, spared)
    left = after.more_than(before, spared)
    print(f"{arguments.requests} requests: {time.monotonic() - began:.0f} s")
    print(f"faults: {dict(sorted(seen.faults.items()))}")
    print(f"outcomes: {dict(seen.kinds)}; numbers were {expected.largest:.1e} apart at most")
    for error, count in seen.errors.most_common(5):
        print(f"  {count} x {error}")
    lost = seen.lost + again.lost
    print(f"workers that had lost nothing: {seen.num_checks + again.num_checks}; lost: {lost}")
    print(f"before: {before}; after: {after}; left behind: {left or 'nothing'}")
    is_whole = not lost and again.num_checks == num_stages and again.kinds == {"equal": 1}
    is_disturbed = seen.faults.total() == arguments.faults
    is_equal = seen.kinds == {"equal": arguments.requests}
    return 0 if is_whole and is_disturbed and is_equal and not left else 1


if __name__ == "__main__":
    sys.exit(main())
