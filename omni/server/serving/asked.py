"""Makes a pipeline's request of what a client asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni.requests.request import OmniRequest

if TYPE_CHECKING:
    from engine import Prompt, SamplingParams
    from omni.server.serving.guard import Client

__all__ = ["AskedRequest", "Terms", "asked"]


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms a request runs.

    Attributes:
        priority: lower comes first.
        cache_salt: the client's own, within those of its key.
        speaker: whose voice answers.
    """

    priority: int = 0
    cache_salt: str | None = None
    speaker: str | None = None


@dataclass(frozen=True, slots=True)
class AskedRequest(OmniRequest):
    """A pipeline's request that came from a client.

    Attributes:
        tenant: see :class:`~omni.server.serving.guard.Client`.
        traceparent: likewise.
    """

    tenant: str | None = None
    traceparent: str | None = None


def asked(
    client: Client,
    prompt: Prompt,
    sampling: Mapping[str, SamplingParams],
    terms: Terms,
    *,
    index: int = 0,
) -> AskedRequest:
    """Make a request, under an id that no client can choose.

    Its cache salt is the client's API key's. A client with another key can then not find out, by
    the time that a prompt takes, whether another client has sent that prompt before.

    Args:
        client: who asks.
        prompt: what is asked.
        sampling: by stage.
        terms: on which it runs.
        index: among several requests of one client's request.
    """
    salts = [salt for salt in (client.tenant, terms.cache_salt) if salt is not None]
    return AskedRequest(
        prompt,
        request_id=f"{client.request_id}-{index}",
        sampling=sampling,
        priority=terms.priority,
        cache_salt=":".join(salts) if salts else None,
        speaker=terms.speaker,
        tenant=client.tenant,
        traceparent=client.traceparent,
    )
