"""LLaVA: a decoder with image input. Imports decoders and the packages below it."""
