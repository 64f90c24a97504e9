"""Responses of a realtime session: planned from the session's options, sent as generated."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from engine import AudioPrompt, ChatPrompt, FinishReason, SamplingParams, Waveform
from engine.interface.log_fields import package_logger
from omni.server.openai.answers import TokenCount, text_stage
from omni.server.openai.chat_request import ChatRequest, merge_sampling, template_values
from omni.server.openai.realtime_conversation import (
    Conversation,
    ConversationItem,
    Part,
    Sound,
    messages_of,
    telephone_code,
)
from omni.server.openai.realtime_events import AudioFormat, OneResponse, ResponseOptions
from omni.server.openai.responses import newer_name
from omni.server.openai.speech import SpokenPieces, check_voice, speaking_stage
from omni.server.openai.tools import ToolCall
from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client
from omni.server.serving.pipeline_server import ServedPipeline
from omni.server.serving.response_stream import ResponseStream, Update

if TYPE_CHECKING:
    from omni.pipelines.pipeline import Pipeline

_logger = package_logger(__name__)

SendEvent: TypeAlias = Callable[..., Awaitable[None]]
"""Sends an event, given its type and, as keyword arguments, its fields."""


class RealtimeResponse:
    """One response to a conversation, which is added to it unless the options exclude that.

    A pipeline with audio input gets the audio of the conversation; a text-only one gets the
    transcripts, once they are complete; an audio-only one gets the last item with audio.

    ``number`` numbers the client's requests. ``is_over`` is true once the response is complete or
    has failed: it can no longer be cancelled, even if its last events are still to be sent.
    """

    def __init__(
        self,
        pipeline: ServedPipeline,
        client: Client,
        conversation: Conversation,
        options: OneResponse,
        number: int,
        send: SendEvent,
    ) -> None:
        self._pipeline = pipeline
        self._client = client
        self._conversation = conversation
        self._options = options
        self._number = number
        self._plan = plan = plan_response(pipeline.omni.pipeline, options, "response")
        self._items = tuple(conversation.items)
        if not self._items and not options.instructions:
            message = "the conversation has no items, and the response no instructions, to answer"
            raise ApiError.bad_request(message)
        self._send = send
        self._sound = SpokenPieces(plan.output.rate, options.audio.output.speed)
        self._speaks = plan.voice is not None
        self._text_kind = "output_audio_transcript" if self._speaks else "output_text"
        self._parser = plan.chat.tool_parser(pipeline.config.tool_parser)
        self.id = f"resp_{client.request_id}_{number}"
        self._output: list[ConversationItem] = []
        self._message: ConversationItem | None = None
        self._held_sound: list[Waveform] = []
        self._sounds_since = 0.0
        self._count = TokenCount()
        self._reason: str | None = None
        self._end = "completed"
        self.is_over = False

    def begin(self, timeout_s: float) -> None:
        """Generate the response in a task, and send it as events; failures are events, too."""
        self.task = asyncio.create_task(self._run(timeout_s))

    async def _run(self, timeout_s: float) -> None:
        error = await failure_of(self._answer(), timeout_s, f"the response {self.id}")
        if error is None:
            return
        self.is_over = True
        if self._message is not None:
            self._message.status = "incomplete"
        await self._send("error", error={**error.to_object()["error"], "event_id": None})
        await self._send("response.done", response=self.describe("failed", error))

    async def _answer(self) -> None:
        plan = self._plan
        await self._send("response.created", response=self.describe("in_progress"))
        request = self._client.request(
            await self._prompt(), plan.sampling, index=self._number, speaker=plan.speaker
        )
        stages = [plan.writer] if plan.voice is None else [plan.writer, plan.voice]
        async with ResponseStream(
            self._pipeline, self._client, [request], "conversation", stages
        ) as stream:
            async for update in stream.updates():
                await self._send_new(update)
                delta = update.of(plan.writer)
                is_whole = delta is not None and delta.finished
                if is_whole and self._output and self._message is None:  # calls only: no speech
                    break
        if self._message is None and not self._output:
            await self._open_message()
        await self._send_samples(self._sound.flush())
        self.is_over = True
        if self._message is not None:
            self._message.is_spoken = True
            await self._close_message(self._message, self._end)
        await self._send("response.done", response=self.describe(self._end))

    async def _prompt(self) -> ChatPrompt:
        read = self._pipeline.describe()["modalities"]["input"]
        hears = "audio" in read
        items, instructions = self._items, self._options.instructions
        if not hears:
            await _await_transcripts(items)
        elif "text" not in read:
            items = tuple(item for item in items if item.role == "user")[-1:]
            instructions = None
            if not items or all(part.sound is None for part in items[0].parts):
                raise ApiError.bad_request("this model hears, and nothing was said to it")
        messages, sounds, images = messages_of(items, instructions, hears=hears)
        if not messages:
            raise ApiError.bad_request("nothing was said that could be answered")
        # Converted in a thread: audio is twice as large in a prompt.
        audio = await asyncio.to_thread(
            lambda: tuple(AudioPrompt(sound.floats, sound.rate) for sound in sounds)
        )
        return ChatPrompt(
            messages,
            multi_modal_data={
                kind: shown for kind, shown in (("audio", audio), ("image", images)) if shown
            },
            tools=tuple(
                tool.model_dump(exclude_none=True) for tool in self._plan.chat.offered_tools
            ),
            chat_template_kwargs=template_values(self._plan.chat),
        )

    async def cancel(self, reason: str) -> None:
        """Cancel the response unless it is over; the conversation keeps the part that was heard."""
        if self.is_over:
            return
        self.is_over, self._reason = True, reason
        message = self._message
        if message is not None:
            message.status = "incomplete"
            before = message.num_bytes
            if self._speaks:
                heard_s = asyncio.get_running_loop().time() - self._sounds_since
                message.keep_heard(min(heard_s, message.spoken_s))
            self._conversation.count(message.num_bytes - before)
        await self.abort()
        if not self.task.cancelled():  # failed first
            return
        if message is not None:
            await self._close_message(message, "incomplete")
        await self._send("response.done", response=self.describe("cancelled"))

    async def abort(self) -> None:
        """Cancel the task, without further events."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def describe(self, status: str, error: ApiError | None = None) -> Mapping[str, Any]:
        """Return the response in the format of events."""
        details: dict[str, Any] | None = None
        if error is not None:
            details = {"type": "failed", "error": {"type": error.kind, "code": error.code}}
        elif status in ("cancelled", "incomplete"):
            details = {"type": status, "reason": self._reason}
        count, usage = self._count, None
        if (written := count.written.get(0)) is not None:
            usage = {
                "input_tokens": count.prompt,
                "output_tokens": written,
                "total_tokens": count.prompt + written,
                "input_token_details": {"cached_tokens": count.cached},
            }
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "output": [item.describe() for item in self._output],
            "output_modalities": ["audio" if self._speaks else "text"],
            "metadata": self._options.metadata,
            "usage": usage,
        }

    async def _send_new(self, update: Update) -> None:
        delta = update.of(self._plan.writer)
        if delta is not None:
            self._count.add(delta)
            if delta.finish_reason == FinishReason.LENGTH:
                self._end, self._reason = "incomplete", "max_output_tokens"
            words, calls = self._parser.feed(delta.text or "", is_last=delta.finished)
            if words:
                await self._send_words(words)
            for call in calls:
                await self._send_call(call)
        sound = update.sound(self._plan.voice)
        if sound is not None:
            # Held back while the text may be a call, which is not spoken.
            self._held_sound.append(sound)
        if self._message is not None or not self._plan.chat.offered_tools:
            held, self._held_sound = self._held_sound, []
            for each in held if self._parser.is_spoken else ():
                await self._send_samples(self._sound.feed(each))

    async def _send_words(self, words: str) -> None:
        message = self._message or await self._open_message()
        message.parts[0].text += words
        self._conversation.count(len(words))
        await self._send(
            f"response.{self._text_kind}.delta", **self._place(message), content_index=0,
            delta=words,
        )  # fmt: skip

    async def _send_samples(self, samples: bytes) -> None:
        if not samples:
            return
        message = self._message or await self._open_message()
        if not message.spoken_s:
            self._sounds_since = asyncio.get_running_loop().time()
        form, rate = self._plan.output, self._sound.rate
        assert rate is not None
        message.spoken_s += Sound(samples, rate).seconds
        if form.type != "audio/pcm":
            samples = telephone_code(samples, form.type)
        await self._send(
            "response.output_audio.delta", **self._place(message), content_index=0,
            delta=b64encode(samples).decode(), rate=rate,
        )  # fmt: skip

    async def _send_call(self, call: ToolCall) -> None:
        arguments, kind = call.function.arguments, "response.function_call_arguments"
        called = {"call_id": call.id, "name": call.function.name, "arguments": arguments}
        item = ConversationItem(type="function_call", call=called, status="in_progress")
        place = await self._open(item)
        await self._send(f"{kind}.delta", **place, call_id=call.id, delta=arguments)
        await self._send(f"{kind}.done", **place, **called)
        await self._close(item, "completed")

    async def _open_message(self) -> ConversationItem:
        kind = "output_audio" if self._speaks else "output_text"
        item = ConversationItem(role="assistant", status="in_progress")
        self._message = item
        place = await self._open(item)
        item.parts.append(Part(kind))
        await self._send(
            "response.content_part.added", **place, content_index=0, part=_part_event(item.parts[0])
        )
        return item

    async def _close_message(self, item: ConversationItem, status: str) -> None:
        if not item.parts:  # cancelled while the message was being opened
            await self._close(item, status)
            return
        place, part = {**self._place(item), "content_index": 0}, item.parts[0]
        if self._speaks:
            await self._send("response.output_audio.done", **place)
        text = {"transcript" if self._speaks else "text": part.text}
        await self._send(f"response.{self._text_kind}.done", **place, **text)
        await self._send("response.content_part.done", **place, part=_part_event(part))
        await self._close(item, status)

    async def _open(self, item: ConversationItem) -> dict[str, Any]:
        self._output.append(item)
        place, shown = self._place(item), item.describe()
        await self._send("response.output_item.added", **place, item=shown)
        before = self._conversation.add(item)
        if self._options.conversation == "auto":
            await self._send("conversation.item.added", previous_item_id=before, item=shown)
        return place

    async def _close(self, item: ConversationItem, status: str) -> None:
        item.status = status
        shown = item.describe()
        await self._send("response.output_item.done", **self._place(item), item=shown)
        if self._options.conversation == "auto":
            await self._send("conversation.item.done", item=shown)

    def _place(self, item: ConversationItem) -> dict[str, Any]:
        index = self._output.index(item)
        return {"response_id": self.id, "output_index": index, "item_id": item.id}


def _part_event(part: Part) -> dict[str, Any]:
    """Return a part in the format of part events, whose types differ from those of items."""
    return {**part.describe(), "type": part.kind.removeprefix("output_")}


async def _await_transcripts(items: Sequence[ConversationItem]) -> None:
    for part in chain.from_iterable(item.parts for item in items):
        if part.transcription is not None:
            await asyncio.wait([part.transcription])
        elif part.sound is not None:
            raise ApiError.bad_request(
                "this model does not hear: start the server with --transcriber NAME, a pipeline "
                "that writes down what is said, or name one in session.audio.input.transcription"
            )


async def failure_of(
    work: Coroutine[Any, Any, None], timeout_s: float, what: str
) -> ApiError | None:
    """Await work of a session; return the error instead of raising, so that the session goes on."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except ApiError as error:
        # As repr: text quoted by an error may look like another log line.
        _logger.warning("%s failed: %.500r", what, error.message)
        return error
    except TimeoutError:
        message = f"{what} was not done after {timeout_s:g} s, the server's limit, and was aborted"
        return ApiError(HTTPStatus.GATEWAY_TIMEOUT, message, code="timeout")
    except Exception:  # the session goes on
        _logger.exception("%s broke", what)
        return ApiError.internal()
    return None


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """Stages and parameters of a response.

    ``writer`` is the stage that outputs text, and ``voice`` the one that outputs audio, None for
    text only. ``chat`` has the tools and the tool choice.
    """

    writer: str
    voice: str | None
    speaker: str | None
    output: AudioFormat
    chat: ChatRequest
    sampling: Mapping[str, SamplingParams]


def plan_response(pipeline: Pipeline, options: ResponseOptions, place: str) -> ResponsePlan:
    """Plan a response; errors name a field below ``place``: ``session`` or ``response``."""
    writer = text_stage(pipeline)
    output = options.audio.output
    is_spoken = options.output_modalities == ["audio"]
    # Checked early if the pipeline speaks; for others, clients may name any voice.
    if is_spoken or pipeline.voices.speaks:
        check_voice(pipeline, output.voice, f"{place}.audio.output.voice")
    voice = speaking_stage(pipeline, f"{place}.output_modalities") if is_spoken else None
    chat = options.as_chat()
    try:
        fields, names = chat.stage_fields()
        if pipeline.stages[writer].sampling is not None:
            fields["n"] = 1  # overrides the stage's own value
        sampling = merge_sampling(pipeline, writer, fields, options.stages or {}, names)
    except ApiError as error:
        raise error.renamed(lambda name: f"{place}.{newer_name(name)}") from error.__cause__
    if writer in sampling and sampling[writer].n != 1:
        at = f"{place}.stages.{writer}.n"
        raise ApiError.bad_field(at, "a conversation goes on in one way only")
    speaker = output.voice if is_spoken else None
    return ResponsePlan(writer, voice, speaker, output.format, chat, sampling)


def merge_options(before: ResponseOptions, change: ResponseOptions) -> OneResponse:
    """Apply a change to options; absent fields keep their values, also within ``audio``."""
    merged = _overlay(
        before.model_dump(exclude_none=True),
        change.model_dump(exclude_unset=True, exclude_none=True, exclude={"type", "model"}),
        depth=2,  # down to the fields of a stage's sampling, and of audio input or output
    )
    return OneResponse.model_validate(merged)


def _overlay(below: Mapping[str, Any], above: Mapping[str, Any], depth: int) -> dict[str, Any]:
    both = below.keys() & above.keys() if depth else ()
    deeper = {
        key: _overlay(below[key], above[key], depth - 1)
        for key in both
        if isinstance(below[key], dict) and isinstance(above[key], dict)
    }
    return {**below, **above, **deeper}
