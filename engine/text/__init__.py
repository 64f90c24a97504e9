"""Tokenizers, chat templates, incremental decoding, stop strings. Imports interface."""

__all__: tuple[str, ...] = ()
