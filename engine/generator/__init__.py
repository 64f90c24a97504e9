"""The engine of generator stages: a fixed iteration over an input, in windows if streamed.

Imports models and the rooms below them.
"""

__all__: tuple[str, ...] = ()
