"""What was said in a session so far."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import AudioPrompt, ChatPrompt
from omni.server.openai.realtime_events import Item
from omni.server.serving.api_error import ApiError
from omni.server.serving.media_bytes import decoded

__all__ = ["Conversation", "Said"]


@dataclass(frozen=True, slots=True)
class Said:
    """What was said until an answer began.

    Attributes:
        messages: oldest first.
        sounds: of the messages' parts, in order: samples of 16 bits, and how many a second.
    """

    messages: tuple[Mapping[str, Any], ...]
    sounds: tuple[tuple[bytes, int], ...]

    async def prompt(self) -> ChatPrompt:
        """Make the prompt. Its sounds are twice as large as they came, and made in a thread."""
        if not self.sounds:
            return ChatPrompt(self.messages)
        sounds = await asyncio.to_thread(lambda: tuple(_sound(*each) for each in self.sounds))
        return ChatPrompt(self.messages, multi_modal_data={"audio": sounds})


class Conversation:
    """The items of a session, and what is being said.

    Args:
        max_bytes: of all text and sound together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._buffer = bytearray()
        self._messages: list[dict[str, Any]] = []
        self._sounds: list[tuple[bytes, int]] = []

    def append(self, samples: bytes) -> None:
        """Hear more.

        Raises:
            ApiError: the session holds too much.
        """
        self._take(len(samples))
        self._buffer += samples

    def clear(self) -> None:
        """Forget what was heard since the last item."""
        self._num_bytes -= len(self._buffer)
        self._buffer.clear()

    def commit(self, rate: int) -> Mapping[str, Any]:
        """Make an item of what was heard.

        Raises:
            ApiError: nothing was heard.
        """
        if not self._buffer:
            raise ApiError.bad_request(
                "nothing was appended to the buffer of sound",
                code="input_audio_buffer_commit_empty",
            )
        _check_whole(self._buffer)
        self._sounds.append((bytes(self._buffer), rate))
        self._buffer.clear()
        self._messages.append({"role": "user", "content": [{"type": "audio"}]})
        return _described(None, "user", [{"type": "input_audio"}])

    async def add(self, item: Item, rate: int) -> Mapping[str, Any]:
        """Add an item.

        Raises:
            ApiError: its sound cannot be read, or the session holds too much.
        """
        parts: list[dict[str, Any]] = []
        sounds: list[tuple[bytes, int]] = []
        size = 0
        for index, part in enumerate(item.content):
            if part.audio is not None:
                samples = await decoded(part.audio, f"item.content[{index}].audio")
                _check_whole(samples)
                sounds.append((samples, rate))
                parts.append({"type": "audio"})
                size += len(samples)
            else:
                text = part.text or ""
                parts.append({"type": "text", "text": text})
                size += len(text)
        self._take(size)
        self._sounds += sounds
        # Plain text where nothing else is said: not every template knows parts.
        is_text = len(parts) == 1 and "text" in parts[0]
        content: Any = parts[0]["text"] if is_text else parts
        self._messages.append({"role": item.role, "content": content})
        told = [part.model_dump(exclude_none=True, exclude={"audio"}) for part in item.content]
        return _described(item.id, item.role, told)

    def answered(self, text: str) -> None:
        """The assistant has said something."""
        self._num_bytes += len(text)
        self._messages.append({"role": "assistant", "content": text})

    def said(self, instructions: str | None) -> Said:
        """All of it, for the next answer.

        Raises:
            ApiError: nothing was said.
        """
        if not self._messages:
            raise ApiError.bad_request("the conversation has no items; there is nothing to answer")
        first = [{"role": "system", "content": instructions}] if instructions else []
        return Said((*first, *self._messages), tuple(self._sounds))

    def _take(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > self._max_bytes:
            raise ApiError.bad_request(
                f"the session would hold {self._num_bytes + num_bytes} bytes of text and sound, "
                f"of at most {self._max_bytes}; begin another",
                code="session_full",
            )
        self._num_bytes += num_bytes


def _check_whole(samples: bytes | bytearray) -> None:
    if len(samples) % 2:
        raise ApiError.bad_request(
            f"audio: samples of 16 bits have two bytes each, got {len(samples)} bytes",
            param="audio",
        )


def _sound(samples: bytes, rate: int) -> AudioPrompt:
    return AudioPrompt(np.frombuffer(samples, "<i2").astype(np.float32) / 2**15, rate)


def _described(item_id: str | None, role: str, content: list[dict[str, Any]]) -> Mapping[str, Any]:
    return {
        "id": item_id or f"item_{uuid.uuid4().hex[:24]}",
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": role,
        "content": content,
    }
