"""Stages in other processes: what crosses between them, and how workers begin and end.

Messages are typed and carry a version, tensors lie in shared memory, and nothing is unpickled.
Knows of stages what they take and give; who drives them, it does not know.
"""

__all__: tuple[str, ...] = ()
