"""Load on a pipeline or on a server, and what it was found to do. ``omni bench`` is its door.

Imports the runtime and what that imports; of the server nothing, which is measured over HTTP like
any other. Sending over HTTP needs the extra ``bench``.
"""

__all__: tuple[str, ...] = ()
