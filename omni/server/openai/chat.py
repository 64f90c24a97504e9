"""Responses to chat and completion requests, in one piece or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from engine import ChatPrompt, FinishReason, Prompt, TextPrompt, TokensPrompt, Waveform
from engine.interface.outputs import OutputDelta
from omni.server.openai.answers import (
    AssistantMessage,
    ChatAudio,
    Choice,
    CompletionPart,
    TextResponse,
    TokenCount,
    as_json,
    parts_of,
    usage_of,
)
from omni.server.openai.chat_request import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    prompts_of,
    template_values,
)
from omni.server.openai.speech import AudioFileFormat, SpokenFile, check_voice, speaking_stage
from omni.server.openai.tokenize import prompt_reader
from omni.server.openai.tools import ToolCallParser
from omni.server.serving.request_body import decode_base64, fetch_file
from omni.server.serving.response_stream import DONE, ResponseStream

_AUDIO_TTL_S = 3600
"""Seconds for which a spoken answer is stored under the id of its audio, if memory allows."""


class Chat(TextResponse):
    """The response to a chat request."""

    prompt_param = "messages"
    id_prefix = "chatcmpl"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, request: Request, body: ChatRequest) -> None:
        super().__init__(request, body)
        self._body = body
        self._voice: str | None = None
        if body.audio is not None:
            self._voice = speaking_stage(self.stages, "modalities")
            check_voice(self.stages, body.audio.voice, "audio.voice")
        self._audio_id = f"audio-{self.client.request_id}"
        self._expires_at = self._created + _AUDIO_TTL_S
        self._words = ""  # text of the spoken completion, in a stream
        self._has_spoken = False
        self._held_sound: list[Waveform] = []
        form = self.pipeline.config.tool_parser
        self._parsers = [body.tool_parser(form) for _ in range(self._n)]  # by completion
        self._count = TokenCount()
        self._has_roles = False  # true once the roles were sent
        # Finish reasons by completion until they are sent; sent completions are in _over.
        self._ended: dict[int, str | None] = {}
        self._over: set[int] = set()

    async def whole(self) -> Response:
        """Return the answer in one piece."""
        async with await self._stream() as stream:
            (last,) = await stream.last_outputs()
        output, voice = last[self._stage], self._voice
        sound = last[voice].audio if voice is not None and voice in last else None
        choices: list[Choice] = []
        for index, each in parts_of(output):
            words, calls = self._parsers[index].feed(each.text or "", is_last=True)
            for call in calls:
                call.index = UNSET
            message = AssistantMessage(role="assistant", content=words)
            if calls:
                message.content, message.tool_calls = words or None, calls
            # Without audio, the answer is text only, as in a stream; calls are not spoken.
            is_spoken = not index and self._parsers[index].is_spoken
            if sound is not None and sound.duration_s and is_spoken:
                message.audio = await self._audio_file(sound, words)
                self._store_text(words)
            choices.append(
                Choice(
                    index=index,
                    message=message,
                    logprobs=self._logprobs.chat(each.logprobs or ()) if self._logprobs else None,
                    finish_reason=_finish_reason(each.finish_reason, self._parsers[index]),
                    token_ids=each.token_ids if self._returns_ids else UNSET,
                )
            )
        answer = self._answer("chat.completion", choices)
        if self._returns_ids:
            answer.prompt_token_ids = output.prompt_token_ids or UNSET  # embeddings have none
        answer.usage = usage_of([TokenCount(output)])
        return Response(as_json(answer), media_type="application/json")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the answer as events: text and audio as they are generated."""
        piece = b""
        async with await self._stream() as stream:
            async for update in stream.updates():
                delta, sound = update.of(self._stage), update.sound(self._voice)
                if delta is not None:
                    self._count.add(delta)
                # Batch events, and the last ones with the end of the stream: each piece costs a
                # system call and wakes the client.
                new = self._new_choices(delta, sound, is_over=update.is_last)
                piece = b"".join(map(self._event, new))
                if piece and not update.is_last:
                    yield piece
        if self._options.include_usage:
            piece += self._event_of([], usage_of([self._count]))
        if self._has_spoken:
            self._store_text(self._words)
        yield piece + DONE

    async def _stream(self) -> ResponseStream:
        body, prompt = self._body, await self._prompt()
        speaker = body.audio.voice if body.audio is not None else None
        request = self.client.request(prompt, self._sampling, speaker=speaker, **body.scheduling)
        stages = [self._stage] if self._voice is None else [self._stage, self._voice]
        return self.stream([request], stages)

    async def _prompt(self) -> ChatPrompt:
        """Create the prompt. Files are passed by content: a client's input is never a path."""
        body = self._body
        said, shown = await self._read_messages()
        return ChatPrompt(
            tuple(said),
            multi_modal_data={kind: items for kind, items in shown.items() if items},
            tools=tuple(tool.model_dump(exclude_none=True) for tool in body.offered_tools),
            chat_template_kwargs=template_values(body),
        )

    async def _read_messages(self) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
        """Return the messages in the format of chat templates, and their files by modality."""
        shown: dict[str, list[Any]] = {"image": [], "audio": [], "video": []}
        room = self.server.settings.limits.max_body_bytes  # for all fetched files together
        said: list[dict[str, Any]] = []
        for number, message in enumerate(self._body.messages):
            if message.content is None or isinstance(message.content, str):
                content, audio = message.content, message.audio
                if not content and audio is not None:
                    place = f"messages[{number}].audio.id"
                    content = audio.transcript
                    if not content:
                        _, (kept,) = self.server.spoken.find(self.client, audio.id, place)
                        content = str(kept["content"])
                said.append(message.for_template(content))
                continue
            parts: list[dict[str, str | None]] = []
            for index, part in enumerate(message.content):
                place = self._place_of(number, index, part)
                if part.file_url is not None:
                    kind = part.type.removesuffix("_url")
                    file = await fetch_file(part.file_url, place, self.server.fetcher, room)
                    room -= len(file)
                    shown[kind].append(file)
                    parts.append({"type": kind})
                elif part.input_audio is not None:
                    shown["audio"].append(await decode_base64(part.input_audio.data, place))
                    parts.append({"type": "audio"})
                else:
                    parts.append({"type": "text", "text": part.text})
            said.append(message.for_template(parts))
        return said, shown

    def _place_of(self, number: int, index: int, part: ContentPart) -> str:
        """Return the path of a part's file in the request."""
        field = "data" if part.type == "input_audio" else "url"
        return f"messages[{number}].content[{index}].{part.type}.{field}"

    def _store_text(self, words: str) -> None:
        """Store the text of the spoken answer, so that later requests can refer to its audio id."""
        kept = {"id": self._audio_id, "expires_at": self._expires_at}
        self.server.spoken.add(self.client, kept, [{"role": "assistant", "content": words}])

    def _event(self, choice: Choice) -> bytes:
        usage = None
        if self._options.continuous_usage_stats:
            is_first = isinstance(choice.delta, AssistantMessage) and choice.delta.role is not UNSET
            usage = self._count.usage_of(None if is_first else choice.index)
        return self._event_of([choice], usage)

    def _new_choices(
        self, delta: OutputDelta | None, sound: Waveform | None, *, is_over: bool
    ) -> list[Choice]:
        """Return the new choices: starts and text of each completion, audio, and ends."""
        new: list[Choice] = []
        parts = dict(parts_of(delta)) if delta is not None else {}
        for index in range(self._n):
            part = parts.get(index)
            if delta is not None and not self._has_roles:
                new.append(
                    Choice(index=index, delta=AssistantMessage(role="assistant", content=""))
                )
            if part is None:
                continue
            ends = part.finish_reason is not None and index not in self._over
            parser = self._parsers[index]
            text, calls = parser.feed(part.text or "", is_last=ends)
            has_ids = self._returns_ids and part.token_ids
            if text or has_ids or (part.logprobs and self._logprobs):
                said = AssistantMessage(content=text)
                if self._voice is not None:
                    said.audio = ChatAudio(id=self._audio_id, transcript=text)
                    self._words += "" if index else text
                choice = Choice(index=index, delta=said)
                if has_ids:
                    choice.token_ids = part.token_ids
                if self._logprobs is not None:
                    choice.logprobs = self._logprobs.chat(part.logprobs or ())
                new.append(choice)
            if calls:
                new.append(Choice(index=index, delta=AssistantMessage(tool_calls=calls)))
            if ends:
                self._ended[index] = _finish_reason(part.finish_reason, parser)
        self._has_roles |= delta is not None
        if sound is not None:
            self._held_sound.append(sound)
        # Hold audio back while the text may be a call, which is not spoken.
        if self._words or not self._body.offered_tools:
            held, self._held_sound = self._held_sound, []
            for each in held if self._parsers[0].is_spoken else ():
                self._has_spoken = True
                data, rate = each.encoded("pcm16"), each.sampling_rate
                audio = ChatAudio(id=self._audio_id, data=data, sampling_rate=rate)
                new.append(Choice(index=0, delta=AssistantMessage(audio=audio)))
        if self._voice is None or is_over:
            for index, reason in self._ended.items():
                last = AssistantMessage()
                if self._has_spoken and not index:
                    last.audio = ChatAudio(id=self._audio_id, expires_at=self._expires_at)
                new.append(Choice(index=index, delta=last, finish_reason=reason))
            self._over.update(self._ended)
            self._ended.clear()
        return new

    async def _audio_file(self, sound: Waveform, transcript: str) -> ChatAudio:
        assert self._body.audio is not None
        content = await asyncio.to_thread(_encode, sound, self._body.audio.format)
        return ChatAudio(
            id=self._audio_id,
            data=content,
            transcript=transcript,
            expires_at=self._expires_at,
            sampling_rate=sound.sampling_rate,
        )


def _encode(sound: Waveform, form: AudioFileFormat | Literal["pcm16"]) -> bytes:
    if form == "opus" or form == "aac":
        file = SpokenFile(form)
        return file.feed(sound) + file.flush()
    return sound.encoded(form)


def _finish_reason(reason: FinishReason | None, parser: ToolCallParser) -> str | None:
    """Return the finish reason of a completion in OpenAI's terms."""
    if parser.num_calls and reason == "stop":
        return "tool_calls"
    return None if reason is None else reason.value


class Completions(TextResponse):
    """The response to a completion request, with ``n`` completions of each prompt."""

    id_prefix = "cmpl"
    chunk_kind = "text_completion"

    def __init__(self, request: Request, body: CompletionRequest) -> None:
        super().__init__(request, body)
        prompts = prompts_of(body.prompt, self.server.settings.limits.max_prompts, "prompt")
        self._requests = [
            self.client.request(prompt, self._sampling, index=index, **body.scheduling)
            for index, prompt in enumerate(prompts)
        ]
        self._echoes: dict[int, str] = {}  # unsent prompts by completion
        if body.echo:
            texts = [self._text_of(prompt) for prompt in prompts]
            self._echoes = dict(enumerate(text for text in texts for _ in range(self._n)))

    async def whole(self) -> Response:
        """Return all completions in one piece."""
        async with self.stream(self._requests, [self._stage]) as stream:
            outputs = [last[self._stage] for last in await stream.last_outputs()]
        choices = [
            self._choice(index * self._n + number, written)
            for index, output in enumerate(outputs)
            for number, written in parts_of(output)
        ]
        for choice in choices if self._returns_ids else ():
            choice.prompt_token_ids = outputs[choice.index // self._n].prompt_token_ids
        answer = self._answer(self.chunk_kind, choices)
        answer.usage = usage_of([TokenCount(output) for output in outputs])
        return Response(as_json(answer), media_type="application/json")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield all completions as events, as they are generated."""
        counts = [TokenCount() for _ in self._requests]
        over: set[int] = set()
        async with self.stream(self._requests, [self._stage]) as stream:
            async for update in stream.updates():
                if (delta := update.of(self._stage)) is None:
                    continue
                count = counts[update.index]
                count.add(delta)
                for number, part in parts_of(delta):
                    at = update.index * self._n + number
                    ends = part.finish_reason is not None and at not in over
                    has_ids = self._returns_ids and part.token_ids
                    if part.text or ends or has_ids or (part.logprobs and self._logprobs):
                        each = self._options.continuous_usage_stats
                        usage = count.usage_of(number) if each else None
                        yield self._event_of([self._choice(at, part)], usage)
                    if ends:
                        over.add(at)
        end = self._event_of([], usage_of(counts)) if self._options.include_usage else b""
        yield end + DONE

    def _text_of(self, prompt: Prompt) -> str:
        if isinstance(prompt, TextPrompt):
            return prompt.prompt
        assert isinstance(prompt, TokensPrompt)
        tokenizer, _ = prompt_reader(self.server, self.pipeline.name)
        return str(tokenizer.decode(list(prompt.prompt_token_ids)))

    def _choice(self, index: int, part: CompletionPart) -> Choice:
        """Convert a completion, or the delta of one."""
        reason = None if part.finish_reason is None else part.finish_reason.value
        text = self._echoes.pop(index, "") + (part.text or "")
        choice = Choice(index=index, text=text, finish_reason=reason)
        if self._logprobs is not None:
            choice.logprobs = self._logprobs.completion(part.logprobs or (), index)
        if self._returns_ids:
            choice.token_ids = part.token_ids
        return choice
