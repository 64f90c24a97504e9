"""What the encoder of an encoder-decoder takes in for one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from prefix_cache import BlockHash

__all__ = ["EncoderInput", "EncoderView"]


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInput:
    """One request's input to the encoder of an encoder-decoder, static from its arrival on.

    Attributes:
        num_tokens: rows that the encoder will give, and slots that cross-attention needs.
        content_hash: of all that the encoder's output depends on.
        token_ids: of a text encoder; empty for others.
        features: of other encoders, by the name of transformers' argument (``input_features``,
            ``pixel_values``, ...), each without a batch dimension.
        text: what the token ids were made of, if that is known.
    """

    num_tokens: int
    content_hash: BlockHash
    token_ids: tuple[int, ...] = ()
    features: Mapping[str, Tensor] = field(default_factory=dict)
    text: str | None = None


@dataclass(frozen=True, slots=True)
class EncoderView:
    """Which rows of the encoder's output the tokens of one decoder sequence see.

    Almost always all see all. They differ where the decoder's prompt holds the place of the image,
    and the image's last tiles may be padding::

        decoder   BOS  Look  <image>  what  is  this ...
                  └ see rows_before ┘└ see rows ...          start = 2

    Attributes:
        start: the first decoder position that follows the encoder's input.
        rows_before: tokens before ``start`` see the first ``rows_before`` rows.
        rows: tokens from ``start`` on see the first ``rows`` rows.
    """

    start: int
    rows_before: int
    rows: int
