"""Decoders with attention and recurrent layers. Imports decoders and the packages below it."""
