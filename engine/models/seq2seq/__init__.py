"""BART and T5: encoder-decoders that read text.

Imports the contracts in engine.models, and layers.
"""

__all__: tuple[str, ...] = ()
