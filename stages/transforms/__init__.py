"""How a stage's prompt is made from what earlier stages put out.

Imports stages.stage and engine.
"""

__all__: tuple[str, ...] = ()
