"""Qwen3.5 with its tower. Imports hybrids, qwen3_vl, decoders and the packages below."""
