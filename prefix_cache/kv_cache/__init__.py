"""The manager that an engine talks to: hits, slots, publishing, swapping, integrity.

Imports every other room of the prefix cache.
"""

__all__: tuple[str, ...] = ()
