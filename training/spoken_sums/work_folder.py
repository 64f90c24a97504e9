"""Where training keeps what it makes: a folder of one plan, which later runs go on in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

WORK = Path("build/spoken_sums")
"""States of training, and the sounds of held-out questions; git leaves ``build`` alone."""

QUICK_WORK = Path("build/spoken_sums_quick")
"""The same of a trial."""


def claim(folder: Path, plan: Mapping[str, int]) -> None:
    """Make a folder of training, or take up the one that is there.

    Every part goes on from what it finds. States of a trial would so be taken for those of a
    training that was cut short.

    Args:
        folder: created if missing; its ``plan.json`` says what is made there.
        plan: how much of everything.

    Raises:
        ValueError: the folder is another plan's.
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
