"""The command line. Imports every other room."""

__all__: tuple[str, ...] = ()
