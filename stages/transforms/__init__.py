"""Transforms from outputs of earlier stages to prompts. Imports stages.stage and engine."""

# The built-in transforms register themselves on import.
from stages.transforms import prompts, speech

__all__ = ("prompts", "speech")
