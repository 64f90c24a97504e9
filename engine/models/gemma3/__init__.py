"""Gemma-3 with image input. Imports another family, decoders and the packages below."""
