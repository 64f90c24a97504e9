"""Qwen2.5-Omni: thinker, talker and code2wav of one checkpoint.

Imports qwen2_5_vl, decoders and the rooms below them.
"""

__all__: tuple[str, ...] = ()
