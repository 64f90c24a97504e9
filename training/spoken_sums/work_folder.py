"""The training folder: belongs to one plan, and later runs resume in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

WORK = Path("build/spoken_sums")
"""States of training, and the sounds of held-out questions; git ignores ``build``."""

QUICK_WORK = Path("build/spoken_sums_quick")
"""The same for a trial."""


def claim(folder: Path, plan: Mapping[str, int]) -> None:
    """Create a training folder, or check that an existing one has the same plan.

    Every part resumes from the states it finds, so those of a trial would be mistaken for those of
    an interrupted training.

    Args:
        folder: created if missing; its ``plan.json`` stores the plan.
        plan: amounts of data and steps.

    Raises:
        ValueError: the folder belongs to another plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "plan.json"
    wanted = dict(plan)
    if not file.exists():
        file.write_text(json.dumps(wanted, indent=2) + "\n")
        return
    found = json.loads(file.read_text())
    if found != wanted:
        names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
        told = ", ".join(f"{name} {found.get(name)} (wanted: {wanted.get(name)})" for name in names)
        raise ValueError(
            f"{folder} holds the training of another plan: {told}. Choose another folder by "
            "--work, or delete that one"
        )
