"""What there is to send: conversations, each a request or several in turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from omni.commands.bench.request_timer import RequestTimer

__all__ = ["LineSource", "LoadConversation", "LoadSource", "LoadTarget", "Send"]

Send: TypeAlias = Callable[[RequestTimer], Awaitable[str]]
"""Sends one request, tells the timer what comes, and returns the text of the answer.

It raises ``RequestFailure`` if the answer is not what it should be."""


class LoadTarget(Protocol):
    """What the load is put on."""

    @property
    def answering_stage(self) -> str | None:
        """The stage that sampling fields are for; None where requests do not name it."""

    def prepare(self, line: Mapping[str, Any], folder: Path) -> Send:
        """Make a request ready to be sent, any number of times.

        Args:
            line: a line of ``requests.jsonl``.
            folder: where the files are that it names.

        Raises:
            ValueError: it cannot be sent there, or a file is not there.
        """

    async def reset_caches(self) -> None:
        """Forget what was computed, where that can be asked for."""


class LoadConversation(Protocol):
    """Requests of which each has to wait for the answer to the one before."""

    def next(self, answer: str | None) -> Send | None:
        """The next request.

        Args:
            answer: the text of the one before; None at the beginning.

        Returns:
            None if there is no more to say.
        """


class LoadSource(Protocol):
    """Where conversations come from."""

    def conversation(self, level: int, number: int) -> LoadConversation:
        """One of the conversations of a level.

        Args:
            level: of load, from 0; -1 for warming up.
            number: of the conversation, from 0; there are as many as are asked for.
        """


class LineSource:
    """Requests of a file, each by itself, in their order and then from the first one again.

    Args:
        sends: one for each line.
    """

    def __init__(self, sends: Sequence[Send]) -> None:
        self._sends = sends

    def conversation(self, level: int, number: int) -> LoadConversation:
        """The same requests for every level."""
        return _OneTurn(self._sends[number % len(self._sends)])


class _OneTurn:
    def __init__(self, send: Send) -> None:
        self._send = send

    def next(self, answer: str | None) -> Send | None:
        return self._send if answer is None else None
