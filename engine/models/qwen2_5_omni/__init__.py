"""Qwen2.5-Omni: thinker, talker, code2wav. Imports qwen2_5_vl, decoders and the packages below."""
