"""Qwen3-Omni: thinker, talker, code2wav. Imports qwen3_vl, decoders and the packages below."""
