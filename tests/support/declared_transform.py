"""A transform as users write them, in a module that imports no more than it needs."""

from __future__ import annotations

from engine import Prompt, TextPrompt
from stages import TransformContext, requires


@requires("hidden_states")
def declared(context: TransformContext) -> Prompt:
    """The request's id."""
    return TextPrompt(context.request_id)
