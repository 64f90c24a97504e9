"""Files that outlive a process, files of strangers, and the classes of transformers that read them.

Imports nothing of the project.
"""

__all__: tuple[str, ...] = ()
