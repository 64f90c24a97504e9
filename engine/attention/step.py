"""One engine step as models hand it to their layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata, StateMetadata

__all__ = ["AttentionStep"]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One engine step, as the layers that keep something need it; everything is per group.

    Attributes:
        backends: what computes a group's attention; None for groups without attention.
        metadata: what the step tells a group's layers; None for groups without layers.
        encoder_hidden_states: ``(encoder tokens, width)`` of the requests whose encoder ran in
            this step, packed in the step's order; cross-attention writes its keys and values from
            them. None when no encoder ran: all that is needed is in the pages.
        follows_encoder: ``(num_tokens,)`` booleans, False for tokens that come before the place of
            their encoder's input in the prompt (an image's), or have none. None: all follow it.
        shows_item: ``(num_tokens,)`` booleans, True for tokens whose embedding is a row of an
            image or the like. None: no token's is.
    """

    backends: Sequence[AttentionBackend | None]
    metadata: Sequence[AttentionMetadata | StateMetadata | None]
    encoder_hidden_states: Tensor | None = None
    follows_encoder: Tensor | None = None
    shows_item: Tensor | None = None
