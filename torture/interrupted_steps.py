"""Interrupts steps at every line, or between bytecodes, continues, and compares the outputs.

    python -m torture.interrupted_steps [--repeats 2] [--only qwen2 jamba ...]
    python -m torture.interrupted_steps --bytecodes --limit 500

A fault is one exception at one line of one step of a batch with shared prefixes, waiting requests
and preemptions. Afterwards the batch is stepped to its end, sometimes with one request aborted, and
all requests are sent again to the same engine with its cache. Every answer must be the one that the
request has alone; nothing may be held when all have ended, and integrity is checked after each
step. Every executed line is interrupted in up to ``--repeats`` steps, or iterations of a loop, with
MemoryError and with KeyboardInterrupt.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from omni.seeded.checkpoints import SEEDED_PREFIX, resolve_model
from tests.support.disturbed_run import Subject, disturbed_run, events_of_steps
from tests.support.line_faults import LineFault, choose_events
from tests.support.subjects import SUBJECTS, subject_of
from torture.outcome_table import Tally

ERRORS: tuple[type[BaseException], ...] = (MemoryError, KeyboardInterrupt)


def interrupt(subject: Subject, args: argparse.Namespace, note: Callable[[str], None]) -> Tally:
    """Inject all chosen faults into one subject."""
    steps = events_of_steps(subject, bytecodes=args.bytecodes)
    draw = random.Random(0)
    places = choose_events(steps, args.repeats, draw)
    if args.limit is not None and len(places) > args.limit:
        places = sorted(draw.sample(places, args.limit))
    what = "bytecode" if args.bytecodes else "line"
    tally = Tally(f"{subject.name}: an exception at any {what} of a step")
    engine = subject.build()
    for number, (step, nth) in enumerate(places):
        for error in ERRORS:
            engine.reset_prefix_cache()
            fault = LineFault(nth, error, bytecodes=args.bytecodes)
            aborted = number % subject.num_asks if number % 3 == 0 else None
            outcome = disturbed_run(engine, subject, step, fault, aborted)
            detail = f"{error.__name__} in step {step} at {outcome.place}: {outcome.detail}"
            tally.add(outcome.kind, detail)
            if outcome.kind not in ("went on", "failed alone"):
                note(f"{subject.name}: {outcome.kind}: {detail}")
                engine = subject.build()
        if number % 100 == 0:
            note(f"{subject.name}: {number} of {len(places)} places, {dict(tally.counts)}")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2, help="steps per line (default 2)")
    parser.add_argument("--bytecodes", action="store_true", help="interrupt between bytecodes")
    parser.add_argument("--limit", type=int, help="most places of each model; all if left out")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=SUBJECTS, metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # every fault would be logged with its traceback

    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    tallies = []
    for name in args.only:
        subject = subject_of(name, lambda model: resolve_model(SEEDED_PREFIX + model))
        tallies.append(interrupt(subject, args, note))
        note(tallies[-1].row())
    return Tally.report(tallies)


if __name__ == "__main__":
    sys.exit(main())
