"""Files of a request that come inside it."""

from __future__ import annotations

import binascii
from base64 import b64decode

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from omni.requests.request_files import only_embeds

__all__ = ["InlineFiles"]


class InlineFiles:
    """What stands where a line of ``requests.jsonl`` names a file; never a path.

    Images, sounds and videos are data URLs, and tensors a safetensors file in base64. See
    :class:`~omni.requests.request_files.RequestFiles`.
    """

    def item(self, key: str, name: str) -> bytes:
        """An image, a sound or a video of a data URL."""
        head, comma, data = name.partition(",")
        head = head.lower()
        if not (comma and head.startswith("data:") and head.endswith(";base64")):
            raise ValueError(
                f"{key}: must be a data URL, such as 'data:audio/wav;base64,...': a server reads "
                f"no files of its own, got {name!r:.80}"
            )
        return _decoded(key, data)

    def at_url(self, key: str, url: str) -> bytes:
        """What a part of a message brings."""
        return self.item(key, url)

    def embeds(self, name: str) -> Tensor:
        """A tensor ``(tokens, hidden)``."""
        try:
            tensors = load(_decoded("prompt_embeds", name))
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f"prompt_embeds: must be a safetensors file in base64: {error}"
            ) from error
        return only_embeds(tensors, "prompt_embeds")


def _decoded(key: str, data: str) -> bytes:
    try:
        return b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{key}: not valid base64: {error}") from error
