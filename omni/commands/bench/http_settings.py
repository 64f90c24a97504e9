"""Which server is asked, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

__all__ = ["Endpoint", "HttpSettings"]

Endpoint: TypeAlias = Literal[
    "chat", "completions", "speech", "embeddings", "transcriptions", "realtime"
]
"""What may be asked for; all but the first two are a server's alone."""


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What is asked, and how.

    Attributes:
        url: of the server, with or without ``/v1``.
        model: its name there; None: the only one that it has.
        api_key: sent as a bearer's; None sends none.
        speech: whether chats are to be answered by sound as well, streamed as pcm16.
        voice: whose; None leaves it to the server.
        endpoint: what is asked for; of chats and completions, each line says which it is.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    speech: bool = False
    voice: str | None = None
    endpoint: Endpoint = "chat"

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good or parts.query or parts.fragment:
            raise ValueError(f"--url: must be such as http://localhost:8000, got {self.url!r:.200}")
        if self.voice is not None and not self.speech and self.endpoint != "speech":
            raise ValueError("--voice goes together with --speech, or with --endpoint speech")
        if self.speech and self.endpoint not in ("chat", "realtime"):
            raise ValueError(f"--speech is about chats and realtime, not about {self.endpoint}")

    @property
    def base_url(self) -> str:
        """Up to ``/v1``."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"
