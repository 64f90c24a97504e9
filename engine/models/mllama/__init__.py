"""Llama 3.2 Vision: cross-attention to pictures. Imports decoders and the rooms below it."""

__all__: tuple[str, ...] = ()
