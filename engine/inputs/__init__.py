"""From a prompt to a request; knows no model.

Imports requests, checkpoints, sampling, text, media, resources, interface.
"""

__all__: tuple[str, ...] = ()
