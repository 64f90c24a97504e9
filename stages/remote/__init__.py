"""Stages in other processes: what crosses between them, and how workers begin and end.

Messages are typed and carry a version, tensors lie in shared memory, and nothing is unpickled.
Imports stages and what drives them, never omni.
"""

__all__: tuple[str, ...] = ()
