"""What stages in processes of their own gain and cost.

    python benchmarks/runtime.py [--rounds 5]

(a) omni_speech streaming: in processes with one thread a worker, against inline with two threads:
    the whole job, and the time to the first sound.
(b) two equally heavy stages, one thread a worker: throughput in processes, against the first stage
    alone on one core.
(d) control: what a token costs more that is generated in a process, against inline, of a model that
    costs nearly nothing.

Both sides run in turns, in one go; printed are medians and ratios. What a hop costs is told by
benchmarks/tensor_hop.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from omni import Omni, OmniRequest
from omni.pipelines.pipeline_config import PipelineConfig

_SPOKEN = [f"what is it that you say, number {number}" for number in range(8)]
_LONG = [f"{number} " + "the quick brown fox jumps over the lazy dog " * 12 for number in range(24)]


@contextmanager
def opened(config: PipelineConfig, threads: int) -> Iterator[Omni]:
    """An Omni that is warm, with torch's threads in this process set."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with Omni(config) as omni:
            omni.generate("warm")
            yield omni
    finally:
        torch.set_num_threads(before)


def speech(config: PipelineConfig, threads: int) -> tuple[float, float]:
    """Seconds of the whole job, and to the first sound of all."""
    with opened(config, threads) as omni:
        began, first = time.perf_counter(), 0.0
        for output in omni.stream([OmniRequest(prompt) for prompt in _SPOKEN]):
            piece = output.stages.get("code2wav")
            if not first and piece is not None and piece.audio_delta is not None:
                first = time.perf_counter() - began
        return time.perf_counter() - began, first


def texts(config: PipelineConfig, threads: int) -> tuple[float, float]:
    """Seconds of a job of long prompts and short answers; the second is not used."""
    with opened(config, threads) as omni:
        began = time.perf_counter()
        omni.generate(_LONG)
        return time.perf_counter() - began, 0.0


def tokens(config: PipelineConfig, threads: int) -> tuple[float, float]:
    """Seconds for each generated token of one request that runs alone."""
    with opened(config, threads) as omni:
        began = time.perf_counter()
        (output,) = omni.generate("Hello")
        count = sum(len(stage.token_ids) for stage in output.stages.values())
        return (time.perf_counter() - began) / count, 0.0


def paired(
    rounds: int, one: Callable[[], tuple[float, float]], other: Callable[[], tuple[float, float]]
) -> list[tuple[float, float]]:
    """Medians of both figures, of both sides, which take turns."""
    sides: list[list[tuple[float, float]]] = [[], []]
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            sides[side].append((one, other)[side]())
    return [
        (statistics.median(each[0] for each in side), statistics.median(each[1] for each in side))
        for side in sides
    ]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    one_thread = {"runtime.kind": "processes"}

    spoken = PipelineConfig.load("omni_speech")
    apart = PipelineConfig.load(
        "omni_speech",
        one_thread | {f"stages.{name}.placement.threads": 1 for name in spoken.stages},
    )
    inline, processes = paired(rounds, lambda: speech(spoken, 2), lambda: speech(apart, 1))
    print(
        f"(a) omni_speech: whole {inline[0]:.2f} s inline, {processes[0]:.2f} s in processes: ",
        end="",
    )
    print(f"{inline[0] / processes[0]:.2f} times as fast; ", end="")
    print(f"first sound {inline[1]:.2f} s, {processes[1]:.2f} s: {inline[1] / processes[1]:.2f}")

    short = {"stages.writer.sampling.max_tokens": 4, "stages.reader.sampling.max_tokens": 4}
    both = PipelineConfig.load(
        "two_step",
        one_thread | short | {f"stages.{n}.placement.threads": 1 for n in ("writer", "reader")},
    )
    alone = PipelineConfig.load("two_step", short)
    alone = alone.model_copy(
        update={
            "stages": {
                "writer": alone.stages["writer"].model_copy(update={"final_output": ("text",)})
            }
        }
    )
    single, double = paired(rounds, lambda: texts(alone, 1), lambda: texts(both, 1))
    ratio = single[0] / double[0]
    print(f"(b) one stage alone {single[0]:.2f} s, two in processes {double[0]:.2f} s: {ratio:.2f}")

    many = {"stages.writer.sampling.max_tokens": 400, "stages.writer.sampling.ignore_eos": True}
    here = PipelineConfig.load("two_step", many)
    there = PipelineConfig.load("two_step", one_thread | many)
    local, remote = paired(rounds, lambda: tokens(here, 1), lambda: tokens(there, 1))
    more = 1e3 * (remote[0] - local[0])
    print(f"(d) a token: {1e3 * local[0]:.3f} ms inline, {more:+.3f} ms in processes")


if __name__ == "__main__":
    main()
