"""Gains and costs of stages in separate processes.

    python benchmarks/runtime.py [--rounds 5] [--only a,b,d,e]

(a) omni_speech streaming: in processes with one thread per worker, compared with inline with two
    threads: the whole job, and the time to the first audio.
(b) two equally heavy stages, long prompts and short outputs, one thread per worker: throughput in
    processes, compared with the first stage alone on one core. A seeded model of 5 M parameters,
    128 prompts of 256 tokens, 4 tokens out; timed from the 16th answer to the last, since the
    second stage is idle until the first one has finished requests. Goal: 0.85.
(d) control: additional cost of a token that is generated in a process instead of inline, with a
    model of almost no cost. Goal: 0.15 ms.
(e) 64 conversations of 5 turns on 4 replicas: prompt tokens hit with routing to the replica that
    holds the prefix, compared with random routing. Counted, not timed.

In (a), (b) and (d) both sides alternate; the output shows medians and the median of the rounds'
ratios. The cost of a hop, (c), is measured by benchmarks/tensor_hop.py.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from engine import TokensPrompt
from omni import Omni, OmniOutput, OmniRequest
from omni.pipelines.pipeline_config import PipelineConfig
from omni.seeded.language_models import build_causal_lm
from stages.remote.remote_stage import PrefixRouter
from stages.worker.messages import Enter

_SPOKEN = [f"what is it that you say, number {number}" for number in range(8)]
_FILLED = 15
"""Number of answers after which all stages have work."""

_REPLICAS, _CONVERSATIONS, _TURNS, _AT_ONCE = 4, 64, 5, 16

Timed = Callable[[], tuple[float, float]]


@contextmanager
def opened(config: PipelineConfig, threads: int) -> Iterator[Omni]:
    """Open a warm Omni, with this process's number of torch threads set."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with Omni(config) as omni:
            omni.generate("warm")
            yield omni
    finally:
        torch.set_num_threads(before)


def speech(config: PipelineConfig, threads: int) -> tuple[float, float]:
    """Measure seconds of the whole job, and to the first audio of any request."""
    with opened(config, threads) as omni:
        began, first = time.perf_counter(), 0.0
        for output in omni.stream([OmniRequest(prompt) for prompt in _SPOKEN]):
            piece = output.stages.get("code2wav")
            if not first and piece is not None and piece.audio_delta is not None:
                first = time.perf_counter() - began
        return time.perf_counter() - began, first


def job(config: PipelineConfig, prompts: Sequence[TokensPrompt]) -> tuple[float, float]:
    """Measure seconds from an early answer to the last one; the second figure is not used."""
    ends = []

    def note(output: OmniOutput) -> None:
        assert output.error is None, output.error
        if output.finished:
            ends.append(time.perf_counter())

    with opened(config, 1) as omni:
        omni.generate(prompts, on_progress=note)
    return ends[-1] - ends[_FILLED], 0.0


def tokens(config: PipelineConfig) -> tuple[float, float]:
    """Measure milliseconds per generated token of one request that runs alone."""
    with opened(config, 1) as omni:
        began = time.perf_counter()
        (output,) = omni.generate("Hello")
        count = sum(len(stage.token_ids) for stage in output.stages.values())
        return 1e3 * (time.perf_counter() - began) / count, 0.0


def paired(rounds: int, one: Timed, other: Timed) -> list[tuple[tuple[float, ...], ...]]:
    """Run both sides alternating; return both figures of both sides, by round."""
    found: list[tuple[tuple[float, ...], ...]] = []
    for number in range(rounds):
        first, second = (one, other) if number % 2 == 0 else (other, one)
        results = [first(), second()]
        found.append(tuple(results if number % 2 == 0 else reversed(results)))
    return found


def medians(found: Sequence[tuple[tuple[float, ...], ...]], figure: int = 0) -> str:
    """Format the medians of a figure, and of the rounds' ratios of first to second side."""
    one, other = ([sides[at][figure] for sides in found] for at in (0, 1))
    ratios = [first / second for first, second in zip(one, other, strict=True)]
    return (
        f"{statistics.median(one):.3f} and {statistics.median(other):.3f}: "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def placed(config: str, stages: Collection[str], **overrides: Any) -> PipelineConfig:
    """Load a shipped pipeline in processes, with one thread per worker."""
    threads = {f"stages.{name}.placement.threads": 1 for name in stages}
    return PipelineConfig.load(config, {"runtime.kind": "processes"} | threads | overrides)


def run_speech(rounds: int) -> None:
    inline = PipelineConfig.load("omni_speech")
    apart = placed("omni_speech", inline.stages)
    found = paired(rounds, lambda: speech(inline, 2), lambda: speech(apart, 1))
    print(f"(a) omni_speech, s inline and in processes: whole {medians(found)}")
    print(f"    first sound {medians(found, 1)}")


def run_throughput(rounds: int, num_prompts: int = 128) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, 700, (num_prompts, 256), generator=generator)
    prompts = [TokensPrompt(tuple(row)) for row in ids.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        model = build_causal_lm(
            folder,
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=768,
        )
        settings = {
            "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 512, "num_blocks": 1024},
            "sampling": {"max_tokens": 4, "ignore_eos": True, "temperature": 0.0},
        }
        stage = {"kind": "autoregressive", "model": str(model), "final_output": "text", **settings}
        alone = PipelineConfig.model_validate({"name": "alone", "stages": {"writer": stage}})
        inputs = {"from": "writer", "transform": "hidden_states_as_prompt_embeds"}
        thread = {"placement": {"threads": 1}}
        both = PipelineConfig.model_validate(
            {
                "name": "both",
                "runtime": {"kind": "processes"},
                "stages": {
                    "writer": stage | thread | {"outputs": ["hidden_states"]},
                    "reader": stage | thread | {"inputs": inputs, "outputs": []},
                },
            }
        )
        found = paired(rounds, lambda: job(alone, prompts), lambda: job(both, prompts))
    print(f"(b) one stage alone and two in processes, s: {medians(found)}, goal 0.85")


def run_tokens(rounds: int) -> None:
    many = {"stages.writer.sampling.max_tokens": 400, "stages.writer.sampling.ignore_eos": True}
    here = PipelineConfig.load("two_step", many)
    there = placed("two_step", here.stages, **many)
    found = paired(rounds, lambda: tokens(here), lambda: tokens(there))
    more = [remote[0] - local[0] for local, remote in found]
    print(f"(d) a token, ms inline and in processes: {medians(found)}; ", end="")
    print(f"{statistics.median(more):+.3f} ms more, goal 0.15")


def chance(self: PrefixRouter, enter: Enter, loads: Mapping[int, int]) -> int:
    """Choose a replica at random, like a router without information."""
    return random.Random(enter.request_id).choice(sorted(loads))


def hits(config: PipelineConfig) -> tuple[int, int]:
    """Run multi-turn conversations; return prompt tokens that were hits, and all of them."""
    order = random.Random(0)
    said = {number: f"Conversation {number}. " for number in range(_CONVERSATIONS)}
    with Omni(config) as omni:
        for turn in range(_TURNS):
            numbers = list(said)
            order.shuffle(numbers)
            for start in range(0, len(numbers), _AT_ONCE):
                batch = numbers[start : start + _AT_ONCE]
                for number in batch:
                    said[number] += f"And what came then, I ask you for the {turn}. time? "
                requests = [OmniRequest(said[each], f"{each}-{turn}") for each in batch]
                for number, output in zip(batch, omni.generate(requests), strict=True):
                    assert output.error is None, output.error
                    said[number] += str(output.stages["writer"].text)
        stats = omni.stats()["writer"]
    return stats.cached_tokens, stats.prompt_tokens


def run_affinity() -> None:
    stage = {
        "kind": "autoregressive",
        "model": "seeded:qwen2",
        "engine": {"block_size": 8, "num_blocks": 2048},
        "sampling": {"max_tokens": 8, "temperature": 0.0},
        "final_output": "text",
    }
    shares = {}
    for replicas in (1, _REPLICAS):
        given = {
            "name": "talk",
            "runtime": {"kind": "processes"},
            "stages": {"writer": stage | {"placement": {"replicas": replicas, "threads": 1}}},
        }
        config = PipelineConfig.model_validate(given)
        shares[f"{replicas} replicas" if replicas > 1 else "one replica"] = hits(config)
        if replicas > 1:
            with patch.object(PrefixRouter, "choose", chance):
                shares["by chance"] = hits(config)
    told = "; ".join(
        f"{name} {cached} of {all_of_them} ({cached / all_of_them:.1%})"
        for name, (cached, all_of_them) in shares.items()
    )
    print(f"(e) hits: {told}")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="a,b,d,e")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    for name, run in (("a", run_speech), ("b", run_throughput), ("d", run_tokens)):
        if name in wanted:
            run(arguments.rounds)
    if "e" in wanted:
        run_affinity()


if __name__ == "__main__":
    main()
