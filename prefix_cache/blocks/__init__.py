"""Blocks, their hashes, the pages that hold them, the order of eviction; the integrity error.

Imports specs.
"""

__all__: tuple[str, ...] = ()
