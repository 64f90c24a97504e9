"""Inputs of a request besides its tokens: encoder input, multimodal items, streamed rows.

Streamed rows accompany a sequence's tokens, and some of them arrive while it is running::

    position    0 ......... n-1 | n | n+1 | ...        | last known | not known yet
    input       row only        | embedding of the token + row      | must not run
                |<- replaced -->|                                   (or, once complete, always
                                                                     the filler row)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from engine.interface.sampling_params import SamplingParams
from engine.sampling.sampler import SamplingState
from prefix_cache import BlockHash, ContentSpan, content_hash

Modality: TypeAlias = Literal["image", "audio", "video"]
"""Modality of a prompt's non-text content."""


@dataclass(frozen=True, slots=True, eq=False)
class MultiModalInput:
    """Tower input of one image, audio or video, and the placeholders that its rows replace.

    ::

        token_ids  | a | b | * | * | * | * | c |     * = placeholder
                           |<-- length -->|          row i of the tower's output goes to
                           offset                    position offset + i

    Rows of a video and its audio alternate. Each piece is an input with the features of the whole;
    pieces of one item share its hash, so its tower runs once for all of them::

        tower's output  | rows_before | length | rows_after |      num_rows of them

    Attributes:
        offset: first placeholder position in the expanded prompt.
        length: number of placeholder tokens, one per row.
        content_hash: digest of everything that the tower's output depends on.
        features: tower inputs for this one item, by transformers' argument names.
        rows_before: rows of the tower's output in earlier pieces.
        rows_after: rows of the tower's output in later pieces.
        whole: for a piece, the span of the whole item, including the tokens around it.
        row_parts: width of a row as a multiple of the embedding width.
        bidirectional: if true, its rows attend to later ones in the decoder; a chunk then contains
            all of them, or all that are not cached.
    """

    modality: Modality
    offset: int
    length: int
    content_hash: bytes
    features: Mapping[str, Tensor]
    rows_before: int = 0
    rows_after: int = 0
    whole: ContentSpan | None = None
    row_parts: int = 1
    bidirectional: bool = False

    @property
    def num_rows(self) -> int:
        """Number of rows of the tower's output."""
        return self.rows_before + self.length + self.rows_after

    @property
    def end(self) -> int:
        """First position after the item."""
        return self.offset + self.length

    @property
    def span(self) -> ContentSpan:
        """Content span that block hashes of the item cover."""
        return self.whole or ContentSpan(self.modality, self.offset, self.length, self.content_hash)

    def piece(self, rows: range, offset: int, whole: ContentSpan) -> MultiModalInput:
        """Return a piece of a whole item with some of its rows, at another offset."""
        rows_after = self.num_rows - rows.stop
        return replace(
            self,
            offset=offset,
            length=len(rows),
            rows_before=rows.start,
            rows_after=rows_after,
            whole=whole,
        )

    def rows_in(self, start: int, stop: int) -> slice:
        """Return the rows of the tower's output for the item's positions in ``[start, stop)``."""
        shift = self.rows_before - self.offset
        return slice(max(start, self.offset) + shift, min(stop, self.end) + shift)

    def overlaps(self, start: int, stop: int) -> bool:
        """Return True if any of the item's rows are in ``[start, stop)``."""
        return self.offset < stop and self.end > start


@dataclass(frozen=True, slots=True, eq=False)
class PromptPositions:
    """Positions of one request's tokens on each axis.

    ::

        prompt      a  b  [ image of 2 x 2 ]  c       generated
        time        0  1   2  2  2  2         4        5  6 ...    the same on all axes, from the
        height      0  1   2  2  3  3         4        5  6 ...    number on that follows those
        width       0  1   2  3  2  3         4        5  6 ...    of the last prompt token

    Attributes:
        table: ``(axes, num_prompt_tokens)`` int64 on the host.
        shift: difference between a generated token's position and its index in the sequence.
    """

    table: Tensor
    shift: int

    @classmethod
    def of(cls, table: Tensor) -> PromptPositions:
        """Derive the shift from a prompt's table; generated tokens may be prompt the next time."""
        return cls(table, int(table[:, -1].max()) + 1 - table.shape[1])

    @property
    def largest(self) -> int:
        """Largest position of a prompt token on any axis."""
        return int(self.table.max())

    def cut(self, start: int, stop: int) -> Tensor:
        """Return the positions ``(axes, stop - start)`` of the tokens from ``start`` on."""
        axes, num_prompt_tokens = self.table.shape
        prompt = self.table[:, start:stop]
        generated = torch.arange(max(start, num_prompt_tokens), max(stop, num_prompt_tokens))
        return torch.cat([prompt, (generated + self.shift).expand(axes, -1)], dim=1)


def embeds_spans(prompt_embeds: Tensor, block_size: int) -> tuple[ContentSpan, ...]:
    """Return one span per block, so that two prompts share the blocks whose rows are equal.

    Args:
        prompt_embeds: ``(num_tokens, hidden_size)``, in the model's dtype.
    """
    rows = prompt_embeds.detach().to("cpu")
    return tuple(
        ContentSpan(
            kind="prompt_embeds",
            offset=block_index * block_size,
            length=block_rows.shape[0],
            content_hash=content_hash(block_rows),
        )
        for block_index, block_rows in enumerate(torch.split(rows, block_size))
    )


def position_spans(positions: PromptPositions, block_size: int) -> tuple[ContentSpan, ...]:
    """Return one span per block whose positions are not implied by the rest of its content.

    Blocks whose positions are plain indices get no span, as in a prompt without a table.
    """
    table = positions.table
    moved = table - torch.arange(table.shape[1])
    return tuple(
        ContentSpan("positions", index * block_size, columns.shape[1], content_hash(columns))
        for index, columns in enumerate(moved.split(block_size, dim=1))
        if columns.any()
    )


def encoder_spans(encoder_input: EncoderInput) -> tuple[ContentSpan, ...]:
    """Return the span that makes the decoder's block hashes depend on the encoder's input.

    It covers the first position only, because every later block's hash includes the first one's.
    """
    return (ContentSpan("encoder_input", 0, 1, encoder_input.content_hash),)


class PromptChoice:
    """Continuation of a prompt by the most likely of some tokens, followed by given ones.

    A speech model detects the spoken language this way. The prompt starts with the known tokens,
    the first step chooses, and the tokens after the choice belong to the prompt as well::

        <|startoftranscript|> | ?                | <|transcribe|> <|notimestamps|> | generated ...
         known                  of ``candidates``  ``then``
        |<- the first step --------------------->|<- the next goes on from here

    Attributes:
        sampling: makes the sampler choose the most likely token, ignoring the request's parameters.
        is_alone: true if the token is chosen without a prefix that is prepended afterwards.
    """

    def __init__(
        self,
        candidates: Sequence[int],
        then: Sequence[int],
        *,
        judged_id: int | None = None,
        is_alone: bool = False,
    ) -> None:
        self.candidates = tuple(candidates)
        self.then = tuple(then)
        self.is_alone = is_alone
        self.sampling = SamplingState(
            SamplingParams(temperature=0.0),
            (),
            0,
            (),
            max(self.candidates) + 1,
            logits_processor=self,
            judged_id=judged_id,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens by which the prompt grows."""
        return 1 + len(self.then)

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """Mask all but the candidates; see ``LogitsProcessor``."""
        kept = torch.tensor(self.candidates, device=logits.device)
        values = logits[kept]
        logits.fill_(-torch.inf)
        logits[kept] = values


def _keyed_spans(keys: Tensor) -> tuple[ContentSpan, ...]:
    """Return one span per run of equal keys, up to the first row without a key."""
    table = keys.numpy()
    num_keyed = int(table.any(axis=1).cumprod().sum())
    if not num_keyed:
        return ()
    differs = (table[1:num_keyed] != table[: num_keyed - 1]).any(axis=1)
    starts = [0, *(differs.nonzero()[0] + 1)]
    return tuple(
        ContentSpan("rows_keyed", int(start), int(stop - start), table[start].tobytes())
        for start, stop in zip(starts, [*starts[1:], num_keyed], strict=True)
    )


class StreamedRows:
    """Rows by position, shared by several completions of one prompt.

    Args:
        rows: ``(num_rows, width)`` of the positions from 0 on, on the host; copied.
        num_replaced: number of leading positions whose token is ignored: the row is the whole
            input. At later positions, row and token embedding are added.
        keys: ``(num_replaced, n)``; leading nonzero keys replace their rows in hashes, and a run of
            equal keys stands for all of its rows together.
    """

    def __init__(self, rows: Tensor, num_replaced: int, keys: Tensor | None = None) -> None:
        self.num_replaced = num_replaced
        self._num_rows = rows.shape[0]
        self._rows = rows.clone()  # later with spare capacity after the known rows
        self._keyed = () if keys is None else _keyed_spans(keys[:num_replaced])
        self._num_keyed = self._keyed[-1].end if self._keyed else 0
        self._filler: Tensor | None = None
        self._filler_hash = b""

    @property
    def is_complete(self) -> bool:
        """True if every row is known, for any length of the sequence."""
        return self._filler is not None

    def num_known(self, limit: int) -> int:
        """Return how many of the first ``limit`` positions have a known row."""
        return limit if self.is_complete else min(limit, self._num_rows)

    def extend(self, rows: Tensor) -> None:
        """Append the next positions' rows, ``(n, width)``, in the same dtype.

        Raises:
            ValueError: if all rows are already known.
        """
        if self.is_complete:
            raise ValueError("the rows had ended, but more came")
        num_rows = self._num_rows + rows.shape[0]
        if num_rows > self._rows.shape[0]:
            # Double the capacity, so that many small chunks do not copy all rows each time.
            grown = self._rows.new_empty(max(num_rows, 2 * self._num_rows), self._rows.shape[1])
            grown[: self._num_rows] = self._rows[: self._num_rows]
            self._rows = grown
        self._rows[self._num_rows : num_rows] = rows
        self._num_rows = num_rows

    def complete(self, filler: Tensor) -> None:
        """Use the row ``filler``, ``(width,)``, at all later positions. ``ValueError`` if set."""
        if self.is_complete:
            raise ValueError("the rows had ended already")
        self._filler = filler.clone()
        self._filler_hash = content_hash(filler)

    def cut(self, start: int, stop: int) -> Tensor:
        """Return rows ``(stop - start, width)``. ``ValueError`` if some are not known."""
        if self.num_known(stop) < stop:
            raise ValueError(f"rows [{start}, {stop}) were asked for, {self._num_rows} are known")
        rows = self._rows[min(start, self._num_rows) : min(stop, self._num_rows)]
        if self._filler is None or len(rows) == stop - start:
            return rows
        return torch.cat([rows, self._filler.expand(stop - start - len(rows), -1)])

    def apply(self, embeds: Tensor, start: int) -> None:
        """Convert token embeddings ``(n, width)`` of positions from ``start`` on to inputs.

        If embeddings are wider, rows are added to their last elements.
        """
        rows = self.cut(start, start + embeds.shape[0]).to(embeds.device)
        num_replaced = min(max(0, self.num_replaced - start), embeds.shape[0])
        embeds[:num_replaced] = 0
        embeds[:, -rows.shape[1] :] += rows

    def spans(self, start: int, stop: int, block_size: int) -> tuple[ContentSpan, ...]:
        """Return the spans of blocks in ``[start, stop)`` of known rows; ``start`` begins a block.

        There is one span per use of rows in a block, because its hash must not depend on chunks
        or on later content.
        """
        spans = [span for span in self._keyed if span.offset < stop and span.end > start]
        for first in range(start, stop, block_size):
            begin, end = max(first, self._num_keyed), min(first + block_size, stop)
            for kind, low, high in (
                ("rows_alone", begin, min(end, self.num_replaced)),
                ("rows_added", max(begin, self.num_replaced), min(end, self._num_rows)),
            ):
                if low < high:
                    spans.append(
                        ContentSpan(kind, low, high - low, content_hash(self._rows[low:high]))
                    )
            filled = max(begin, self._num_rows)
            if filled < end:
                spans.append(ContentSpan("filler_added", filled, end - filled, self._filler_hash))
        return tuple(spans)


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInput:
    """Input of a request to the encoder of an encoder-decoder, fixed on arrival.

    Attributes:
        num_tokens: number of rows of the encoder's output, and of slots for cross-attention.
        content_hash: digest of everything that the encoder's output depends on.
        token_ids: input of a text encoder; empty for others.
        features: inputs of other encoders, by transformers' argument name (``input_features``,
            ``pixel_values``, ...), each without a batch dimension.
        text: source text of the token ids, if known.
    """

    num_tokens: int
    content_hash: BlockHash
    token_ids: tuple[int, ...] = ()
    features: Mapping[str, Tensor] = field(default_factory=dict)
    text: str | None = None


@dataclass(frozen=True, slots=True)
class EncoderView:
    """Rows of the encoder's output to which the tokens of a decoder sequence attend.

    Almost always all tokens attend to all rows. They differ if the decoder's prompt contains the
    image placeholder, and the image's last tiles may be padding::

        decoder   BOS  Look  <image>  what  is  this ...
                  └ see rows_before ┘└ see rows ...          start = 2

    Attributes:
        start: first decoder position after the encoder's input.
        rows_before: number of leading rows visible to tokens before ``start``.
        rows: number of leading rows visible to tokens from ``start`` on.
    """

    start: int
    rows_before: int
    rows: int
