"""A transform as users write them, in a module with minimal imports."""

from __future__ import annotations

from engine import Prompt, TextPrompt
from stages import TransformContext, requires


@requires("hidden_states")
def declared(context: TransformContext) -> Prompt:
    """Return the request's id."""
    return TextPrompt(context.request_id)
