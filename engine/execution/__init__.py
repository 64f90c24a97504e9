"""Runs a scheduled step: tables, metadata, the forward pass, sampling.

Imports scheduling, models and the rooms below them.
"""

__all__: tuple[str, ...] = ()
