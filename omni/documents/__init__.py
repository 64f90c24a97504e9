"""YAML and JSON as people write them, and errors that name the place. Imports no room."""

__all__: tuple[str, ...] = ()
