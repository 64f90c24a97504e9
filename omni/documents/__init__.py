"""YAML and JSON as people write them, and errors that name the place.

Imports nothing of the project.
"""

__all__: tuple[str, ...] = ()
