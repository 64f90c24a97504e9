"""One answer of a realtime session."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from omni.server.openai.response_plan import planned
from omni.server.openai.spoken_sound import TRANSCRIPT_GAP_S, SpokenPieces
from omni.server.serving.asked import Terms, asked
from omni.server.serving.feeds import Feeds, Update

if TYPE_CHECKING:
    from omni.server.openai.conversation import Conversation
    from omni.server.openai.realtime_events import ResponseWish
    from omni.server.serving.api_error import ApiError
    from omni.server.serving.guard import Client
    from omni.server.serving.served_pipeline import ServedPipeline
    from stages import StageOutput

__all__ = ["RealtimeResponse"]


class _Send(Protocol):
    async def __call__(self, kind: str, **content: Any) -> None: ...


class RealtimeResponse:
    """One answer to a conversation.

    Args:
        pipeline: that answers.
        client: who asks.
        conversation: so far; a whole answer is added to it.
        wish: how it is to be.
        number: of the response in its session.

    Attributes:
        id: by which events name it.
        is_over: whether it is whole or has failed, so that it cannot be cancelled any more, though
            its end may still have to be told.

    Raises:
        ApiError: it cannot run as asked.
    """

    def __init__(
        self,
        pipeline: ServedPipeline,
        client: Client,
        conversation: Conversation,
        wish: ResponseWish,
        number: int,
    ) -> None:
        self._pipeline = pipeline
        self._client = client
        self._conversation = conversation
        self._number = number
        self._plan = planned(pipeline.omni.pipeline, wish, "response")
        self._said = conversation.said(wish.instructions)
        self._stage, self._voice = self._plan.writer, self._plan.voice
        self._pieces = SpokenPieces(self._plan.output_rate)
        self.id = f"resp_{client.request_id}_{number}"
        self._item_id = f"item_{client.request_id}_{number}"
        self.is_over = False
        self._text = ""
        self._output: StageOutput | None = None

    async def run(self, send: _Send) -> None:
        """Answer, and tell of it as it comes.

        Raises:
            ApiError: the request was refused, or failed.
        """
        await send("response.created", response=self.described("in_progress"))
        await send("response.output_item.added", **self._place(), item=self._item("in_progress"))
        plan = self._plan
        request = asked(
            self._client,
            await self._said.prompt(),
            plan.sampling,
            Terms(speaker=plan.speaker),
            index=self._number,
        )
        gap = TRANSCRIPT_GAP_S if self._voice is not None else 0.0
        async with Feeds(self._pipeline, [request], "conversation", text_gap_s=gap) as feeds:
            async for update in feeds.updates():
                await self._tell(update, send)
                if update.has_finished(self._stage, self._voice):
                    break
        await self._tell_sound(self._pieces.rest(), send)
        self.is_over = True
        self._conversation.answered(self._text)
        kind = "output_text" if self._voice is None else "output_audio_transcript"
        key = "text" if self._voice is None else "transcript"
        if self._voice is not None:
            await send("response.output_audio.done", **self._place())
        await send(f"response.{kind}.done", **self._place(), **{key: self._text})
        await send("response.output_item.done", **self._place(), item=self._item("completed"))
        await send("response.done", response=self.described("completed"))

    def cancel(self) -> None:
        """It was cancelled; what was said until then is part of the conversation."""
        if self._text and not self.is_over:
            self._conversation.answered(self._text)
        self.is_over = True

    async def fail(self, error: ApiError, send: _Send) -> None:
        """Tell that it ends like that."""
        self.is_over = True
        await send("error", error={**error.to_object()["error"], "event_id": None})
        await send("response.done", response=self.described("failed", error))

    def described(self, status: str, error: ApiError | None = None) -> Mapping[str, Any]:
        """The response as events tell it."""
        details = None
        if error is not None:
            details = {"type": "failed", "error": {"type": error.kind, "code": error.code}}
        elif status == "cancelled":
            details = {"type": "cancelled", "reason": "client_cancelled"}
        has_begun = self._text or status == "completed"
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "output": [self._item(status)] if has_begun else [],
            "usage": self._usage(),
        }

    async def _tell(self, update: Update, send: _Send) -> None:
        output = update.output.stages.get(self._stage)
        if output is not None:
            self._output = output
            new, self._text = (output.text or "")[len(self._text) :], output.text or ""
            kind = "output_text" if self._voice is None else "output_audio_transcript"
            if new:
                await send(f"response.{kind}.delta", **self._place(), delta=new)
        sounds = update.sounds.get(self._voice or "")
        if sounds:
            await self._tell_sound(self._pieces.of(sounds), send)

    async def _tell_sound(self, samples: bytes, send: _Send) -> None:
        if samples:
            delta = b64encode(samples).decode()
            rate = self._pieces.rate
            await send("response.output_audio.delta", **self._place(), delta=delta, rate=rate)

    def _place(self) -> dict[str, Any]:
        return {
            "response_id": self.id,
            "item_id": self._item_id,
            "output_index": 0,
            "content_index": 0,
        }

    def _item(self, status: str) -> Mapping[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": self._text}
        if self._voice is not None:
            part = {"type": "output_audio", "transcript": self._text}
        return {
            "id": self._item_id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed" if status == "completed" else "incomplete",
            "role": "assistant",
            "content": [part] if self._text else [],
        }

    def _usage(self) -> Mapping[str, Any] | None:
        if self._output is None:
            return None
        prompt, written = self._output.num_prompt_tokens, len(self._output.token_ids)
        return {
            "input_tokens": prompt,
            "output_tokens": written,
            "total_tokens": prompt + written,
            "input_token_details": {"cached_tokens": self._output.num_cached_tokens},
        }
