"""What each type of layer keeps of a sequence, and what all of them can serve together.

Imports blocks, specs.
"""

__all__: tuple[str, ...] = ()
