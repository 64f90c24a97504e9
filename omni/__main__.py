"""``python -m omni`` is the same as ``omni``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    try:
        from omni.commands.cli import app
    except KeyboardInterrupt:  # before a command listens
        sys.exit(130)
    app(prog_name="omni")


def _leave_working_directory() -> None:
    """Take the working directory off the import path, where ``-m`` has put it first.

    What is there is no part of the program: a ``tabulate.py`` would be imported in place of the
    package of that name. A user who wants that sets ``PYTHONPATH``. The folder of a checkout that
    is run in place stays.
    """
    here = os.getcwd()
    is_checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here
    if not sys.flags.safe_path and sys.path[:1] == [here] and not is_checkout:
        del sys.path[0]


if __name__ == "__main__":
    _leave_working_directory()
    main()
