"""The client of an HTTP request, and the requests to a pipeline that are made for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine import Prompt, SamplingParams
from omni.requests.request import OmniRequest


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of an HTTP request, as far as the server cares.

    The ``request_id`` is made here, and unique. The ``tenant`` is the same for all requests with
    one API key, and reveals nothing of the key; None where no key is needed. ``traceparent`` is the
    header of that name, as it came.
    """

    request_id: str
    tenant: str | None
    traceparent: str | None = None

    def request(
        self,
        prompt: Prompt,
        sampling: Mapping[str, SamplingParams],
        *,
        index: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        speaker: str | None = None,
    ) -> OmniRequest:
        """Make a request to a pipeline, under an id that no client can choose.

        Its cache salt is that of the client's API key. A client with another key can then not find
        out, by the time that a prompt takes, whether another client has sent that prompt before.
        ``index`` is its own among several requests of one HTTP request.
        """
        salts = [salt for salt in (self.tenant, cache_salt) if salt is not None]
        return OmniRequest(
            prompt,
            request_id=f"{self.request_id}-{index}",
            sampling=sampling,
            priority=priority,
            cache_salt=":".join(salts) if salts else None,
            speaker=speaker,
        )
