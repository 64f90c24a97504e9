"""Makes a chat prompt of messages, with the images, sounds and videos that stand among them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from engine import ChatPrompt
from omni.server.openai.chat_request import ChatMessage
from omni.server.serving.media_bytes import decoded, fetched
from omni.server.serving.url_fetcher import UrlFetcher

__all__ = ["chat_prompt"]


async def chat_prompt(
    messages: Sequence[ChatMessage], fetcher: UrlFetcher, max_bytes: int
) -> ChatPrompt:
    """Make the prompt. Files are handed on by their content: nothing that a client sends is a path.

    Args:
        messages: oldest first.
        fetcher: of images and videos in the network.
        max_bytes: of all of them together.

    Raises:
        ApiError: with status 400: a file cannot be had; with 429: too many requests wait for such.
    """
    with fetcher.place() if any(map(_has_address, messages)) else nullcontext():
        return await _prompt(messages, fetcher, max_bytes)


def _has_address(message: ChatMessage) -> bool:
    """Whether something of it has to be fetched."""
    if isinstance(message.content, str):
        return False
    urls = (part.file_url for part in message.content)
    return any(url is not None and url[:5].lower() != "data:" for url in urls)


async def _prompt(
    messages: Sequence[ChatMessage], fetcher: UrlFetcher, max_bytes: int
) -> ChatPrompt:
    shown: dict[str, list[Any]] = {"image": [], "audio": [], "video": []}
    room = max_bytes
    said: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        # OpenAI's newer name for the same.
        role = "system" if message.role == "developer" else message.role
        if isinstance(message.content, str):
            said.append({"role": role, "content": message.content})
            continue
        parts: list[dict[str, str | None]] = []
        for index, part in enumerate(message.content):
            place = f"messages[{number}].content[{index}]"
            if part.file_url is not None:
                place += f".{part.type}.url"
                kind = part.type.removesuffix("_url")
                shown[kind].append(await fetched(part.file_url, place, fetcher, room))
                room -= len(shown[kind][-1])
                parts.append({"type": kind})
            elif part.input_audio is not None:
                place += ".input_audio.data"
                shown["audio"].append(await decoded(part.input_audio.data, place))
                parts.append({"type": "audio"})
            else:
                parts.append({"type": "text", "text": part.text})
        said.append({"role": role, "content": parts})
    return ChatPrompt(
        tuple(said), multi_modal_data={kind: items for kind, items in shown.items() if items}
    )
