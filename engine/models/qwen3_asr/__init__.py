"""Qwen3-ASR: a decoder with audio input. Imports two other families, and packages below them."""
