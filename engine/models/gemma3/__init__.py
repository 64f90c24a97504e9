"""Gemma-3 with image input. Imports llava, decoders and the packages below."""
