"""Reads checkpoints in the Hugging Face layout: configs, weights, the parts of a whole.

Imports nothing of the project.
"""

__all__: tuple[str, ...] = ()
