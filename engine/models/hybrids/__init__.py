"""Decoder-only families that mix attention with recurrent layers.

Imports the contracts in engine.models, and layers.
"""

__all__: tuple[str, ...] = ()
