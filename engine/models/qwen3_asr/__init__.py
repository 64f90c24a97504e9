"""Qwen3-ASR: a decoder with audio input. Imports qwen3_omni, llava and the packages below them."""
