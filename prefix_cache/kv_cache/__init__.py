"""The manager that an engine talks to: hits, slots, publishing, swapping, integrity.

Imports every other room.
"""

__all__: tuple[str, ...] = ()
