"""Files that outlive a process, and files of strangers. Imports nothing of the project."""

__all__: tuple[str, ...] = ()
