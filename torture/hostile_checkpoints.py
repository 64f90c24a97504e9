"""Loads checkpoints that are corrupted in every known way, each in a separate process.

Each must be refused by a ``ValueError`` that names the file and the error, or load and answer;
within 30 seconds and 1.5 GB.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from omni.seeded.checkpoints import resolve_model
from tests.support.hostile_checkpoints import Hostile, hostile_checkpoints
from tests.support.model_trial import TRIALS
from torture.guarded_process import Guarded, run_guarded
from torture.outcome_table import Tally

SECONDS, MAX_BYTES, MAX_MB = 30.0, 3 * 2**29, 1500.0


def judge(found: Guarded, folder: Path, names: tuple[str, ...]) -> tuple[str, str]:
    """Return the outcome of a checkpoint, and details.

    Args:
        found: result of the run.
        folder: folder of the checkpoint.
        names: texts that its error must contain; empty if it may also load.
    """
    detail = f"{found.kind} {' '.join(found.told)}"[:300]
    if found.kind == "hangs":
        return "hangs", detail
    if found.kind == "died":
        return "wrong", detail
    if found.peak_mb > MAX_MB:
        return "wrong", f"{found.peak_mb:.0f} MB: {detail}"
    if found.kind == "returned" and not found.told[0]:
        return ("silently broken", "it loaded and answered") if names else ("went on", detail)
    told = found.told[-1]
    if found.kind == "raised" and found.told[0] != "ValueError":
        return "wrong", detail
    if found.kind == "raised" and str(folder) not in told:
        return "wrong", f"does not name the file: {detail}"
    missing = [name for name in names if name not in told]
    return ("wrong", f"does not name {missing}: {detail}") if missing else ("failed alone", detail)


def warm_up() -> None:
    """Import, once for all children, the modules that running a model imports.

    With one thread: a forked child lacks a pool's other threads, and would wait for them.
    """
    torch.set_num_threads(1)
    for family in ("qwen2", "bert", "code2wav", "whisper", "llava", "mllama", "thinker"):
        TRIALS[family].run(resolve_model(f"seeded:{TRIALS[family].seeded}"))


def try_one(
    family: str, spoil: Callable[[Path], object], names: tuple[str, ...], tally: Tally, what: str
) -> str | None:
    """Corrupt a copy, load it, and count the outcome; return the message if it was refused."""
    trial = TRIALS[family]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "checkpoint")
        shutil.copytree(resolve_model(f"seeded:{trial.seeded}"), folder)
        spoil(folder)
        found = run_guarded(partial(trial.run, folder), SECONDS, MAX_BYTES)
        outcome, detail = judge(found, folder, names)
        tally.add(outcome, f"{family}: {what}: {detail}")
        return found.told[-1] if found.kind == "raised" else None


def main() -> int:
    """Try all, or those of some families; return 1 if any outcome is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=list(TRIALS))
    chosen = parser.parse_args().family or list(TRIALS)
    warm_up()
    cases = [case for case in hostile_checkpoints() if case.family in chosen]
    tallies: dict[str, Tally] = {}
    for case in cases:
        tally = tallies.setdefault(_kind(case), Tally(f"hostile checkpoint: {_kind(case)}"))
        try_one(case.family, case.spoil, case.names, tally, case.what)
    return Tally.report(tallies.values())


def _kind(case: Hostile) -> str:
    for word, kind in (
        ("voices", "voices"),
        ("processor", "processor"),
        ("tokenizer", "tokenizer"),
        ("generation", "generation config"),
    ):
        if word in case.what:
            return kind
    about_weights = ("weights", "tensor", "shard", "header", "index")
    return "weights" if any(word in case.what for word in about_weights) else "config"


if __name__ == "__main__":
    sys.exit(main())
