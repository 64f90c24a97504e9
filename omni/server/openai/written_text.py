"""What a stage has written: texts, log-probabilities and counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.interface.deferred import num_items
from omni.server.openai.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from omni.server.openai.token_texts import TokenPlaces, TokenTexts
from omni.server.serving.api_error import ApiError

if TYPE_CHECKING:
    from engine import SamplingParams, TokenLogprobs
    from omni.pipelines.pipeline import Pipeline
    from omni.server.serving.served_pipeline import ServedPipeline
    from stages import StageOutput

__all__ = [
    "LogprobWriter",
    "Written",
    "completions_of",
    "num_completions",
    "text_stage",
    "usage_of",
    "usage_so_far",
]

_LEAST = -9999.0
"""In the place of minus infinity, which JSON does not have; as OpenAI's own answers have it."""


@dataclass(frozen=True, slots=True)
class Written:
    """One completion, as far as it has come.

    Attributes:
        text: all of it so far.
        num_tokens: generated so far.
        finish_reason: ``stop`` or ``length``; None while it goes on.
        logprobs: per token, if they were asked for.
    """

    text: str
    num_tokens: int
    finish_reason: str | None
    logprobs: Sequence[TokenLogprobs]


def text_stage(pipeline: Pipeline) -> str:
    """The stage whose text answers: the last one that the user gets text of.

    Raises:
        ApiError: with status 400: there is none.
    """
    writing = [name for name, stage in pipeline.stages.items() if "text" in stage.final_output]
    if not writing:
        raise ApiError.bad_request(
            "this model writes no text; /v1/pipelines/{name} gives all that it makes", param="model"
        )
    return writing[-1]


def num_completions(pipeline: Pipeline, stage: str, sampling: Mapping[str, SamplingParams]) -> int:
    """How many completions of each prompt a request asks of a stage."""
    params = sampling.get(stage, pipeline.stages[stage].sampling)
    return params.n if params is not None else 1


def completions_of(output: StageOutput, n: int) -> list[Written]:
    """Every completion of an output, in order.

    Args:
        output: of a stage that has text.
        n: how many were asked for; see :func:`num_completions`.
    """
    if n == 1:  # what the output itself tells, none of its tokens copied
        reason = output.finish_reason
        text, logprobs = output.text or "", output.logprobs or ()
        num_tokens = num_items(output, "token_ids")
        return [Written(text, num_tokens, None if reason is None else reason.value, logprobs)]
    return [
        Written(
            each.text,
            len(each.token_ids),
            None if each.finish_reason is None else each.finish_reason.value,
            each.logprobs or (),
        )
        for each in output.completions
    ]


def usage_of(outputs: Sequence[StageOutput]) -> Usage:
    """Count the tokens of prompts, and of all their completions."""
    written = sum(len(each.token_ids) for output in outputs for each in output.completions)
    return _usage(outputs, written)


def usage_so_far(output: StageOutput, num_tokens: int) -> Usage:
    """Count the tokens of a prompt beside those of one of its completions."""
    return _usage([output], num_tokens)


def _usage(outputs: Sequence[StageOutput], written: int) -> Usage:
    prompt = sum(output.num_prompt_tokens for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


class LogprobWriter:
    """Writes log-probabilities, with the text of each token by itself.

    Args:
        pipeline: whose tokens they are.
        stage: that generated them.

    Raises:
        ApiError: with status 400: the stage has no tokenizer that could tell their texts.
    """

    def __init__(self, pipeline: ServedPipeline, stage: str) -> None:
        tokenizer = pipeline.tokenizer(stage)
        if tokenizer is None:
            raise ApiError.bad_request(
                f"logprobs: the stage {stage!r} has no tokenizer to name tokens by",
                param="logprobs",
            )
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)

    def places(self) -> TokenPlaces:
        """For a completion that begins: where its tokens stand."""
        return TokenPlaces(self._tokenizer, self._texts)

    def chat(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """In the shape of chats."""
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    **self._token(entry.token_id, entry.logprob),
                    top_logprobs=[TopLogprob(**self._token(*each)) for each in entry.top],
                )
                for entry in entries
            ]
        )

    def completion(
        self, entries: Sequence[TokenLogprobs], places: TokenPlaces
    ) -> CompletionLogprobs:
        """In the shape of completions.

        Args:
            entries: what to write.
            places: of this completion; it has taken all tokens before these.
        """
        return CompletionLogprobs(
            tokens=[self._texts.text(entry.token_id) for entry in entries],
            token_logprobs=[_number(entry.logprob) for entry in entries],
            top_logprobs=[self._by_text(entry) for entry in entries],
            text_offset=[places.append(entry.token_id) for entry in entries],
        )

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the chosen one; of several with one text, the likeliest."""
        told: dict[str, float] = {}
        for token_id, logprob in entry.top:
            told.setdefault(self._texts.text(token_id), _number(logprob))
        # Clients look it up by the text that they are told of it.
        told[self._texts.text(entry.token_id)] = _number(entry.logprob)
        return told

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        own = self._texts.bytes_of(token_id)
        return {
            "token": self._texts.text(token_id),
            "logprob": _number(logprob),
            "bytes": None if own is None else list(own),
        }


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
