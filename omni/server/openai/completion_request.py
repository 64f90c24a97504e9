"""What a request for completions may say."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from engine.interface.placed_error import PlacedError
from omni.server.openai.chat_request import StreamOptions
from omni.server.openai.prompt_list import PromptList
from omni.server.openai.sampling_fields import SamplingFields

__all__ = ["CompletionRequest"]


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
    }

    model: str
    prompt: PromptList
    max_tokens: int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise PlacedError(("stream_options",), "needs stream to be true")
        return self

    def sampling_fields(self) -> dict[str, Any]:
        """What is asked of the stage that answers."""
        fields = self.given_fields()
        if self.max_tokens is not None:
            fields["max_tokens"] = self.max_tokens
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        return fields
