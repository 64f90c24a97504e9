"""YAML as people write it, with the place of everything, and its errors. Imports engine."""

__all__: tuple[str, ...] = ()
