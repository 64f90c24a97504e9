"""Request files in, output files out. Imports stages, engine."""

__all__: tuple[str, ...] = ()
