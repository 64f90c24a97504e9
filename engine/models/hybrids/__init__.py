"""Decoders that mix attention with recurrent layers. Imports decoders and the rooms below it."""
