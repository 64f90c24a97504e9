"""Qwen3-ASR: a decoder that hears. Imports two rooms of other families, and those below them."""
