"""Mllama: a decoder with cross-attention to images. Imports decoders and the packages below it."""
