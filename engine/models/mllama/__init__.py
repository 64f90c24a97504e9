"""Mllama: a decoder with cross-attention to pictures. Imports decoders and the rooms below it."""
