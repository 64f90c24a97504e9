"""The name that ``omni.seeded.checkpoints`` had before it moved: scripts still import it."""
