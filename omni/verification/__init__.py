"""Runs a pipeline cached and uncached, and compares.

Imports runtime and the rooms below it.
"""

__all__: tuple[str, ...] = ()
