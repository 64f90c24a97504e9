"""The name that ``omni.seeded.checkpoints`` had before it moved: scripts still import it."""

from omni.seeded.checkpoints import resolve_model as resolve_model
