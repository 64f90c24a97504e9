"""Runs every script of this folder, one after another; called by ``make torture``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run the scripts, each in a separate process; return 1 if one has failed."""
    folder = Path(__file__).parent
    names = sorted(file.stem for file in folder.glob("*.py") if "__main__" in file.read_text())
    names.remove(Path(__file__).stem)
    failed = []
    for name in names:
        print(f"\n== torture.{name}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"{folder.name}.{name}"], cwd=folder.parent)
        if done.returncode:
            failed.append(name)
    print(f"\n{len(names) - len(failed)} of {len(names)} scripts found nothing wrong")
    for name in failed:
        print(f"torture.{name} failed", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
