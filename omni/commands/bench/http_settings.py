"""Which server is asked, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

__all__ = ["HttpSettings"]


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What is asked, and how.

    Attributes:
        url: of the server, with or without ``/v1``.
        model: its name there; None: the only one that it has.
        api_key: sent as a bearer's; None sends none.
        speech: whether chats are to be answered by sound as well, streamed as pcm16.
        voice: whose; None leaves it to the server.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    speech: bool = False
    voice: str | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good or parts.query or parts.fragment:
            raise ValueError(f"--url: must be such as http://localhost:8000, got {self.url!r:.200}")
        if self.voice is not None and not self.speech:
            raise ValueError("--voice goes together with --speech")

    @property
    def base_url(self) -> str:
        """Up to ``/v1``."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"
