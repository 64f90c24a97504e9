"""Qwen2.5-VL: a decoder with image and video input. Imports decoders and the packages below it."""
