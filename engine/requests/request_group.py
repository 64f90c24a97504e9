"""The completions of one user request, and the output they make together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine.interface.outputs import CompletionOutput, FinishReason, RequestOutput
from engine.requests.request import Request

__all__ = ["Completion", "RequestGroup"]


@dataclass(slots=True)
class Completion:
    """One of a request's ``n`` completions.

    Attributes:
        request: the sequence that computes it.
        finish_reason: None while it runs.
        tensors: its stage outputs, once finished.
    """

    request: Request
    finish_reason: FinishReason | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def output(self, index: int) -> CompletionOutput:
        """The state now; takes the text's growth since the last call."""
        request = self.request
        return CompletionOutput(
            index=index,
            text=request.text.text,
            delta=request.text.take_delta(),
            token_ids=tuple(request.output_token_ids),
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
            finish_reason=self.finish_reason,
            tensors=self.tensors,
        )


@dataclass(slots=True)
class RequestGroup:
    """A user's request: its completions run as sequences of their own and share a prompt.

    Attributes:
        request_id: the user's.
        completions: in order of their index.
        has_prompt_ids: whether the prompt came as ids or text, not as embeddings.
        error: why the request failed, or None.
    """

    request_id: str
    completions: tuple[Completion, ...]
    has_prompt_ids: bool
    error: str | None = None

    @classmethod
    def of(cls, request_id: str, requests: Sequence[Request]) -> RequestGroup:
        """Group the sequences that :class:`InputProcessor` made of one request."""
        return cls(
            request_id,
            tuple(Completion(request) for request in requests),
            has_prompt_ids=requests[0].prompt_embeds is None,
        )

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.finish_reason is not None for completion in self.completions)

    def finish(self, request: Request, reason: FinishReason, tensors: Mapping[str, Tensor]) -> None:
        """Record the end of one completion."""
        completion = next(c for c in self.completions if c.request is request)
        completion.finish_reason = reason
        completion.tensors = tensors
        request.text.finish()
        request.times.finished = time.monotonic()

    def output(self) -> RequestOutput:
        """The state now."""
        first = self.completions[0].request
        slowest = max(
            (completion.request for completion in self.completions),
            key=lambda request: request.times.finished or float("inf"),
        )
        encoder = first.encoder_input
        prompt_ids = first.token_ids[: first.num_prompt_tokens] if self.has_prompt_ids else ()
        return RequestOutput(
            request_id=self.request_id,
            outputs=tuple(c.output(index) for index, c in enumerate(self.completions)),
            finished=self.finished,
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=min(first.num_cached_tokens or 0, first.num_prompt_tokens),
            error=self.error,
            prompt_token_ids=tuple(prompt_ids),
            encoder_prompt_token_ids=(encoder and encoder.token_ids) or None,
            encoder_prompt=None if encoder is None else encoder.text,
            metrics=slowest.times.metrics(
                sum(completion.request.num_preemptions for completion in self.completions)
            ),
        )
