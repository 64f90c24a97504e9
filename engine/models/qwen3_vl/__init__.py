"""Qwen3-VL: a decoder that sees pictures and dated videos. Imports qwen2_5_vl and those below."""
