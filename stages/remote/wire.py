"""The one codec that links and workers speak."""

from __future__ import annotations

from stages.remote import control
from stages.remote.codec import Codec
from stages.remote.worker_log import Logged
from stages.trace_events import StageEvent, Traced
from stages.worker import messages

__all__ = ["wire_codec"]


def wire_codec() -> Codec:
    """A codec that knows every command, event and call."""
    codec = Codec()
    for kind in (StageEvent, Traced, Logged):
        codec.register(kind)
    for module in (messages, control):
        for name in module.__all__:
            kind = getattr(module, name)
            if isinstance(kind, type):
                codec.register(kind)
    return codec
