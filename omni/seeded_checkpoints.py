"""Former location of ``omni.seeded.checkpoints``, kept for scripts that still import it."""

from omni.seeded.checkpoints import resolve_model as resolve_model
