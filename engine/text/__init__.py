"""Tokenizers, chat templates, incremental decoding, stop strings. Imports interface."""
