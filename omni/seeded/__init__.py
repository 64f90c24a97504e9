"""Tiny checkpoints with seeded random weights, written when they are first asked for.

Imports engine.
"""

__all__: tuple[str, ...] = ()
