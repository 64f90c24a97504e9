"""Gemma-3 with images: a decoder that sees. Imports llava, decoders and what is below."""
