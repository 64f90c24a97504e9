"""Replaces every value of every family's config.json, and loads what comes of it.

Each has to be refused by a ``ValueError`` that names the file, or to load and answer, be it with
the error of a request; within 30 seconds and 1.5 GB, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from functools import partial
from pathlib import Path

from omni.seeded.checkpoints import resolve_model
from tests.support.config_changes import ConfigChange, config_changes
from tests.support.model_trial import TRIALS
from tests.support.outcome_table import Tally
from torture.hostile_checkpoints import try_one, warm_up

__all__ = ["main"]


def main() -> int:
    """Try all, or a sample; returns 1 if any outcome must not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=list(TRIALS))
    parser.add_argument("--most", type=int, help="changes tried of each family, chosen by chance")
    parser.add_argument("--only", default="", help="changes whose place holds this text")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warm_up()
    tallies = []
    for family in options.family or TRIALS:
        folder = Path(resolve_model(f"seeded:{TRIALS[family].seeded}"))
        changes = list(config_changes(json.loads((folder / "config.json").read_text())))
        chosen = [change for change in changes if options.only in change.what]
        if options.most is not None and len(chosen) > options.most:
            chosen = random.Random(options.seed).sample(chosen, options.most)
        tally = Tally(f"config.json of {family}")
        for change in chosen:
            try_one(family, partial(_put, change), (), tally, change.what)
        tallies.append(tally)
    return Tally.report(tallies)


def _put(change: ConfigChange, folder: Path) -> None:
    (folder / "config.json").write_text(change.text)


if __name__ == "__main__":
    sys.exit(main())
