"""What users touch: prompts, configs, sampling, outputs, stats; and how mistakes in them are told.

Imports no torch, no other room.
"""

__all__: tuple[str, ...] = ()
