"""What users of an engine touch: prompts, configs, sampling parameters, outputs, stats.

Imports no torch when it is imported, and no other room.
"""

__all__: tuple[str, ...] = ()
