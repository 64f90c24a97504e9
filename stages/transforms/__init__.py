"""How a stage's prompt is made from what earlier ones put out. Imports stages.stage and engine."""

# The transforms that are shipped register themselves.
from stages.transforms import prompts, speech

__all__ = ("prompts", "speech")
