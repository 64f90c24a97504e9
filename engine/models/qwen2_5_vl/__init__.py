"""Qwen2.5-VL: a decoder that sees pictures and videos. Imports decoders and the rooms below it."""
