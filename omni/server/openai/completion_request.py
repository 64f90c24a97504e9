"""What a request for completions may say."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, model_validator

from engine import Prompt, TextPrompt, TokensPrompt
from engine.interface.placed_error import PlacedError
from omni.server.openai.chat_request import StreamOptions
from omni.server.openai.sampling_fields import SamplingFields

__all__ = ["CompletionRequest"]

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


class CompletionRequest(SamplingFields):
    """A request for completions.

    Attributes:
        model: name of a pipeline.
        prompt: text or token ids, or a list of several of either.
        max_tokens: of each completion.
        logprobs: of how many tokens beside the chosen one to report them.
        stream: whether to answer by server-sent events.
        stream_options: how.
    """

    without_effect: ClassVar = frozenset(("user",))
    not_supported: ClassVar = {
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "logit_bias": (),
    }

    model: str
    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[str], Tag("texts")]
        | Annotated[_Ids, Tag("ids")]
        | Annotated[list[Annotated[_Ids, Field(min_length=1)]], Tag("lists")],
        Discriminator(
            _form_of,
            custom_error_type="no_form",
            custom_error_message="Input should be text, a list of texts, a list of token ids, or "
            "a list of such lists",
        ),
    ]
    max_tokens: int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise PlacedError(("stream_options",), "needs stream to be true")
        return self

    def prompts(self) -> list[Prompt]:
        """The prompts, at least one."""
        if isinstance(self.prompt, str):
            return [TextPrompt(self.prompt)]
        made: list[Prompt] = []
        ids: list[int] = []
        for each in self.prompt:
            if isinstance(each, int):
                ids.append(each)
            else:
                made.append(
                    TextPrompt(each) if isinstance(each, str) else TokensPrompt(tuple(each))
                )
        return [*made, TokensPrompt(tuple(ids))] if ids else made

    def sampling_fields(self) -> dict[str, Any]:
        """What is asked of the stage that answers."""
        fields = self.given_fields()
        if self.max_tokens is not None:
            fields["max_tokens"] = self.max_tokens
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        return fields
