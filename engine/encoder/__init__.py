"""The engine of encoder stages: one forward pass for an input, outputs cached.

Imports models, inputs and the rooms below them.
"""

__all__: tuple[str, ...] = ()
