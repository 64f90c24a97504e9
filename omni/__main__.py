"""``python -m omni`` is the same as ``omni``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    try:
        from omni.commands.cli import app
    except KeyboardInterrupt:  # before any command handles it
        sys.exit(130)
    app(prog_name="omni")


def _leave_working_directory() -> None:
    """Remove the working directory from the import path, where ``-m`` has put it first.

    Its files are not part of the program: a ``tabulate.py`` would be imported instead of the
    package of that name. Users who want that set ``PYTHONPATH``. The folder of a checkout that
    is run in place stays.
    """
    here = os.getcwd()
    is_checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here
    if not sys.flags.safe_path and sys.path[:1] == [here] and not is_checkout:
        del sys.path[0]


if __name__ == "__main__":
    _leave_working_directory()
    main()
