"""Sound and pictures as files and as arrays.

Imports nothing of the project.
"""

__all__: tuple[str, ...] = ()
