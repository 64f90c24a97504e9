"""The bytes behind block ids: pages of keys and values, mirrored outputs, encoder outputs.

Imports blocks, specs.
"""

__all__: tuple[str, ...] = ()
