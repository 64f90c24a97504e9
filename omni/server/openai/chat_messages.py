"""Makes a chat prompt of messages, with the images and sounds that stand among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine import ChatPrompt
from omni.server.openai.chat_request import ChatMessage, ContentPart
from omni.server.serving.media_bytes import decoded, fetched
from omni.server.serving.url_fetcher import UrlFetcher

__all__ = ["chat_prompt"]


async def chat_prompt(messages: Sequence[ChatMessage], fetcher: UrlFetcher) -> ChatPrompt:
    """Make the prompt. Files are handed on by their content: nothing that a client sends is a path.

    Args:
        messages: oldest first.
        fetcher: of images in the network.

    Raises:
        ApiError: with status 400: a file cannot be had.
    """
    shown: dict[str, list[Any]] = {"image": [], "audio": []}
    said: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        # OpenAI's newer name for the same.
        role = "system" if message.role == "developer" else message.role
        if isinstance(message.content, str):
            said.append({"role": role, "content": message.content})
            continue
        parts = []
        for index, part in enumerate(message.content):
            place = f"messages[{number}].content[{index}]"
            parts.append(await _part(part, place, shown, fetcher))
        said.append({"role": role, "content": parts})
    return ChatPrompt(
        tuple(said), multi_modal_data={kind: items for kind, items in shown.items() if items}
    )


async def _part(
    part: ContentPart, place: str, shown: dict[str, list[Any]], fetcher: UrlFetcher
) -> dict[str, str | None]:
    """A part as chat templates know it; what it shows is put with the others."""
    if part.image_url is not None:
        url = part.image_url.url
        shown["image"].append(await fetched(url, f"{place}.image_url.url", fetcher))
        return {"type": "image"}
    if part.input_audio is not None:
        data = part.input_audio.data
        shown["audio"].append(await decoded(data, f"{place}.input_audio.data"))
        return {"type": "audio"}
    return {"type": "text", "text": part.text}
