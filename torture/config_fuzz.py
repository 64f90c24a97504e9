"""Replaces every value of the JSON files of every family, and loads the result.

Each must be refused by a ``ValueError`` that names the file, or load and answer, possibly with the
error of a request; within 30 seconds and 1.5 GB, in a separate process.
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
from torture.hostile_checkpoints import try_one, warm_up
from torture.outcome_table import Tally

_FILES = (
    *("config.json", "generation_config.json", "preprocessor_config.json"),
    *("processor_config.json", "tokenizer_config.json", "tokenizer.json"),
)


def main() -> int:
    """Try all, or a sample; return 1 if any outcome is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=list(TRIALS))
    parser.add_argument("--file", action="append", choices=_FILES)
    parser.add_argument("--most", type=int, help="changes of each file, chosen by chance")
    parser.add_argument("--only", default="", help="changes whose place holds this text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unnamed", action="store_true", help="print those that name no key")
    options = parser.parse_args()
    warm_up()
    refused: dict[bool, list[str]] = {True: [], False: []}
    tallies: dict[str, Tally] = {}
    for family in options.family or TRIALS:
        folder = Path(resolve_model(f"seeded:{TRIALS[family].seeded}"))
        for name in options.file or _FILES:
            if not (folder / name).is_file():
                continue
            changes = config_changes(json.loads((folder / name).read_text()))
            chosen = [change for change in changes if options.only in change.what]
            if options.most is not None and len(chosen) > options.most:
                chosen = random.Random(options.seed).sample(chosen, options.most)
            what = f"{name} of {family}" if name == "config.json" else name
            tally = tallies.setdefault(what, Tally(what))
            for change in chosen:
                what = f"{name}: {change.what}"
                told = try_one(family, partial(_put, name, change), (), tally, what)
                if told is not None:
                    refused[change.key in told].append(f"{family}: {what}: {told[:200]}")
    status = Tally.report(tallies.values())
    count = sum(map(len, refused.values()))
    print(f"{len(refused[True])} of {count} refusals name the key, and not only the file")
    if options.unnamed:
        print(*refused[False], sep="\n")
    return status


def _put(name: str, change: ConfigChange, folder: Path) -> None:
    (folder / name).write_text(change.text)


if __name__ == "__main__":
    sys.exit(main())
