"""A request as it comes to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.interface.prompts import Prompt
    from engine.interface.sampling_params import SamplingParams

__all__ = ["NewRequest"]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What :meth:`engine.Engine.begin_request` was given; of all but the prompt the type is right.

    Attributes:
        request_id: no live request has it.
        prompt: what to run, or its first chunk.
        sampling: how tokens are chosen; None takes the defaults.
        priority: lower runs earlier.
        cache_salt: what was computed is shared only within one salt.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams | None = None
    priority: int = 0
    cache_salt: str | None = None
