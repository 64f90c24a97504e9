"""Notes for how long the text of streamed answers may wait."""

from __future__ import annotations

from typing import Any

import pytest

from omni.server.openai import chat, realtime, speech
from omni.server.serving.feeds import Feeds

__all__ = ["note_text_gaps"]


def note_text_gaps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, one for each answer that a server in this process begins from now on."""
    gaps: list[float] = []

    def noting(*given: Any, text_gap_s: float = 0.0) -> Feeds:
        gaps.append(text_gap_s)
        return Feeds(*given, text_gap_s=text_gap_s)

    for module in (chat, realtime, speech):
        monkeypatch.setattr(module, "Feeds", noting)
    return gaps
