"""Blocks, their hashes, the pages that hold them and the order of eviction.

Imports specs.
"""

__all__: tuple[str, ...] = ()
