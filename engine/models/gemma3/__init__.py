"""Gemma-3 with images: a decoder that sees. Imports another such room, and those below it."""
