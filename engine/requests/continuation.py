"""What follows on a sequence that has ended, in the same request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.interface.outputs import FinishReason
from engine.requests.encoder_input import EncoderInput

__all__ = ["Continuation", "Sequel"]


@dataclass(frozen=True, slots=True)
class Sequel:
    """How a request goes on after one of its sequences.

    Attributes:
        num_kept: how many of the generated tokens, from the first on, are part of the output.
        encoder_input: what the encoder gets for the next sequence; None if there is none.
        continuation: what follows on the next one.
    """

    num_kept: int
    encoder_input: EncoderInput | None = None
    continuation: Continuation | None = None


class Continuation(Protocol):
    """Goes through an encoder's input that is longer than its window, a sequence for each window.

    ::

        input     |<---- window ---->|
                          |<---- window ---->|           begins where the first one's text ended
        output    | kept  | dropped  |
                          | kept .......     |

    The next sequence has the same prompt. Which of a sequence's tokens are kept is known when it
    has ended, and the request puts out no others.
    """

    @property
    def begin_s(self) -> float:
        """Where the sequence's window begins in the input, in seconds."""

    def follow(self, generated: Sequence[int], reason: FinishReason) -> Sequel:
        """Say how the request goes on.

        Args:
            generated: by the sequence that has ended; at least one token.
            reason: why it ended.
        """
