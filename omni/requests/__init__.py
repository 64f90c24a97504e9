"""Request files in, output files out. Imports documents, stages, engine."""

__all__: tuple[str, ...] = ()
