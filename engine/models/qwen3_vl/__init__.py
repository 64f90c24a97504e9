"""Qwen3-VL: a decoder with image and timestamped video input. Imports qwen2_5_vl and below."""
