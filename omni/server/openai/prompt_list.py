"""One prompt or several, as text or as token ids."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from engine import Prompt, TextPrompt, TokensPrompt
from omni.server.serving.api_error import ApiError

__all__ = ["PromptList", "prompts_of"]

_Ids = list[Annotated[int, Field(ge=0)]]


def _form_of(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, (list, tuple)) or not value:
        return None
    for kind, name in ((str, "texts"), (int, "ids"), ((list, tuple), "lists")):
        if isinstance(value[0], kind):
            return name
    return None


PromptList = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[_Ids, Tag("ids")]
    | Annotated[list[Annotated[_Ids, Field(min_length=1)]], Tag("lists")],
    Discriminator(
        _form_of,
        custom_error_type="no_form",
        custom_error_message="Input should be text, a list of texts, a list of token ids, or a "
        "list of such lists",
    ),
]
"""Text or token ids, or a list of several of either."""


def prompts_of(given: str | list[Any], limit: int, param: str) -> list[Prompt]:
    """Make prompts of a :data:`PromptList`.

    Raises:
        ApiError: with status 400: they are more than the limit.
    """
    if isinstance(given, str):
        return [TextPrompt(given)]
    if isinstance(given[0], int):
        return [TokensPrompt(tuple(given))]
    if len(given) > limit:
        raise ApiError.bad_request(
            f"{param}: at most {limit} are taken at once, got {len(given)}", param=param
        )
    return [
        TextPrompt(each) if isinstance(each, str) else TokensPrompt(tuple(each)) for each in given
    ]
