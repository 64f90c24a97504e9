"""What layers keep: specs of cached state, grouped into a config.

Imports nothing of the project.
"""

__all__: tuple[str, ...] = ()
