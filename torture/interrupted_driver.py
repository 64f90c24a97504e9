"""Interrupts the thread that drives a pipeline at every line, and then sends more requests.

    python -m torture.interrupted_driver [--repeats 2]

A fault is one MemoryError at one line of `omni/runtime` or `stages/worker`, while three requests
run through a pipeline that streams from stage to stage, with and without a trace. The requests are
streamed, awaited, aborted or abandoned. Each must be answered as without a fault, or fail with the
fault as its cause; then all are sent again, and must be answered. In between no stage may hold any
resources.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from pathlib import Path

import torch

from tests.support.disturbed_pipeline import DisturbedPipeline
from tests.support.speech_pipeline import PROMPTS, speech_stages
from torture.outcome_table import Tally


def interrupt(what: str, traces: Path | None, repeats: int) -> Tally:
    """Inject all chosen faults into one pipeline, which is reopened after a bad outcome."""
    tally = Tally(f"{what}: an exception at any line of its driver")
    pipeline = DisturbedPipeline(
        lambda: speech_stages((2, 3), thinker={"seats": 2}), PROMPTS, traces=traces
    )
    for place in pipeline.places(repeats, random.Random(0)):
        outcome = pipeline.run(place)
        if outcome.place is None and outcome.kind == "went on":
            continue  # other threads were scheduled differently: the line ran less often
        tally.add(outcome.kind, f"{place.way}, at {outcome.place}: {outcome.detail}")
        if outcome.kind not in ("went on", "failed alone"):
            print(f"{outcome.kind}: {place} {outcome}", file=sys.stderr, flush=True)
            pipeline.open()
    pipeline.omni.close()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2, help="turns of a line (default 2)")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # every fault would be logged with its traceback
    with tempfile.TemporaryDirectory() as folder:
        tallies = [
            interrupt("speech", None, repeats),
            interrupt("speech with a trace", Path(folder), repeats),
        ]
    return Tally.report(tallies)


if __name__ == "__main__":
    sys.exit(main())
