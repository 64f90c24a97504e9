"""Which tokens run in the next step, and which requests hold which blocks for it.

Imports requests and the rooms below it; no model.
"""

__all__: tuple[str, ...] = ()
