"""``python -m omni`` is the same as ``omni``."""

from __future__ import annotations

from omni.commands.cli import app

__all__: list[str] = []

if __name__ == "__main__":
    app(prog_name="omni")
