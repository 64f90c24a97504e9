"""What the encoder of an encoder-decoder takes in for one request.

Rows that come beside a sequence's tokens, some of them while it already runs.

::

    position    0 ......... n-1 | n | n+1 | ...        | last known | not known yet
    input       row alone       | embedding of the token + row      | must not run
                |<- replaced -->|                                   (or, once complete, the
                                                                     filler row for ever)
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
"""What a prompt can show beside its text."""


@dataclass(frozen=True, slots=True, eq=False)
class MultiModalInput:
    """What a tower gets for one image or the like, and the placeholders that its rows replace.

    ::

        token_ids  | a | b | * | * | * | * | c |     * = placeholder
                           |<-- length -->|          row i of the tower's output goes to
                           offset                    position offset + i

    Rows of a video with its sound come in turns. Each piece is an input, with the features of the
    whole; pieces of one item share its hash, so that its tower runs once for all of them::

        tower's output  | rows_before | length | rows_after |      num_rows of them

    Attributes:
        offset: first placeholder position in the expanded prompt.
        length: placeholder tokens, one for each of its rows.
        content_hash: digest of everything that the tower's output depends on.
        features: what the tower gets, by transformers' argument names, for this one item.
        rows_before: rows of the tower's output that lie in earlier pieces.
        rows_after: those that lie in later ones.
        whole: of a piece, what it is a piece of, with the tokens around it.
        row_parts: how many times as wide as an embedding a row is.
        bidirectional: whether the decoder lets its rows see those behind them; a chunk then has
            all of them, or all that no cached block has.
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
        """Rows of the tower's output."""
        return self.rows_before + self.length + self.rows_after

    @property
    def end(self) -> int:
        """First position after the item."""
        return self.offset + self.length

    @property
    def span(self) -> ContentSpan:
        """The content that keys the blocks of the item."""
        return self.whole or ContentSpan(self.modality, self.offset, self.length, self.content_hash)

    def piece(self, rows: range, offset: int, whole: ContentSpan) -> MultiModalInput:
        """Some of the rows of a whole item, at another place."""
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
        """The rows of the tower's output for the item's positions in ``[start, stop)``."""
        shift = self.rows_before - self.offset
        return slice(max(start, self.offset) + shift, min(stop, self.end) + shift)

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any of the item's rows lie in ``[start, stop)``."""
        return self.offset < stop and self.end > start


@dataclass(frozen=True, slots=True, eq=False)
class PromptPositions:
    """Where the tokens of one request lie on each axis.

    ::

        prompt      a  b  [ image of 2 x 2 ]  c       generated
        time        0  1   2  2  2  2         4        5  6 ...    the same on all axes, from the
        height      0  1   2  2  3  3         4        5  6 ...    number on that follows those
        width       0  1   2  3  2  3         4        5  6 ...    of the last prompt token

    Attributes:
        table: ``(axes, num_prompt_tokens)`` int64 on the host.
        shift: what generated tokens' places in the sequence are off by.
    """

    table: Tensor
    shift: int

    @classmethod
    def of(cls, table: Tensor) -> PromptPositions:
        """Work out the shift from a prompt's table: what was generated may be prompt next time."""
        return cls(table, int(table[:, -1].max()) + 1 - table.shape[1])

    @property
    def largest(self) -> int:
        """Largest place of a prompt token on any axis."""
        return int(self.table.max())

    def cut(self, start: int, stop: int) -> Tensor:
        """Positions ``(axes, stop - start)`` of the tokens from ``start`` on."""
        axes, num_prompt_tokens = self.table.shape
        prompt = self.table[:, start:stop]
        generated = torch.arange(max(start, num_prompt_tokens), max(stop, num_prompt_tokens))
        return torch.cat([prompt, (generated + self.shift).expand(axes, -1)], dim=1)


def embeds_spans(prompt_embeds: Tensor, block_size: int) -> tuple[ContentSpan, ...]:
    """One span per block, so that two prompts share the blocks in which their rows agree.

    Args:
        prompt_embeds: ``(num_tokens, hidden_size)``, in the type the model will see.
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
    """One span per block of a prompt whose places nothing else of its content states.

    None for blocks whose places are indices: those are the same as of a prompt without a table.
    """
    table = positions.table
    moved = table - torch.arange(table.shape[1])
    return tuple(
        ContentSpan("positions", index * block_size, columns.shape[1], content_hash(columns))
        for index, columns in enumerate(moved.split(block_size, dim=1))
        if columns.any()
    )


def item_spans(items: Sequence[MultiModalInput]) -> tuple[ContentSpan, ...]:
    """Distinguishes placeholders of one image from those of another."""
    # Pieces of one video with its sound have one span together.
    return tuple(dict.fromkeys(item.span for item in items))


def encoder_spans(encoder_input: EncoderInput) -> tuple[ContentSpan, ...]:
    """What keys a decoder's blocks by the encoder's input, on which all of them depend.

    At the first position only: the hash of every later block covers that of the first.
    """
    return (ContentSpan("encoder_input", 0, 1, encoder_input.content_hash),)


class PromptChoice:
    """How a prompt goes on: by the likeliest of some tokens, and then by given ones.

    So a speech model finds out which language is spoken. The prompt begins with what is known, the
    first step chooses, and what follows then is prompt as well::

        <|startoftranscript|> | ?                | <|transcribe|> <|notimestamps|> | generated ...
         known                  of ``candidates``  ``then``
        |<- the first step --------------------->|<- the next goes on from here

    Attributes:
        sampling: makes the sampler take the likeliest, whatever the request's own parameters say.
        is_alone: whether more comes before all of it, once the token is chosen without.
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
        """How much longer the prompt gets."""
        return 1 + len(self.then)

    def apply(self, logits: Tensor, generated: Sequence[int]) -> None:
        """Mask all but the candidates; see ``LogitsProcessor``."""
        kept = torch.tensor(self.candidates, device=logits.device)
        values = logits[kept]
        logits.fill_(-torch.inf)
        logits[kept] = values


def _keyed_spans(keys: Tensor) -> tuple[ContentSpan, ...]:
    """A span for all leading rows of one key after the other, up to the first that has none."""
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
    """One row per position; several completions of one prompt share them.

    Args:
        rows: ``(num_rows, width)`` of the positions from 0 on, on the host; copied.
        num_replaced: positions whose token counts for nothing: their row is all the input. At
            later positions row and token embedding are added up.
        keys: ``(num_replaced, n)`` of these; leading ones that are not 0 stand for their rows in
            hashes, those of several rows in turn that are equal for all of them together.
    """

    def __init__(self, rows: Tensor, num_replaced: int, keys: Tensor | None = None) -> None:
        self.num_replaced = num_replaced
        self._num_rows = rows.shape[0]
        self._rows = rows.clone()  # with room to grow behind the known rows
        self._keyed = () if keys is None else _keyed_spans(keys[:num_replaced])
        self._num_keyed = self._keyed[-1].end if self._keyed else 0
        self._filler: Tensor | None = None
        self._filler_hash = b""

    @property
    def is_complete(self) -> bool:
        """Whether every row is known, however long the sequence gets."""
        return self._filler is not None

    def num_known(self, limit: int) -> int:
        """Leading positions, of ``limit``, whose row is known."""
        return limit if self.is_complete else min(limit, self._num_rows)

    def extend(self, rows: Tensor) -> None:
        """Add the next positions' rows, ``(n, width)`` in the type of the others.

        Raises:
            ValueError: all rows are known already.
        """
        if self.is_complete:
            raise ValueError("the rows had ended, but more came")
        num_rows = self._num_rows + rows.shape[0]
        if num_rows > self._rows.shape[0]:
            # Doubled, so that many small chunks do not copy all rows each time.
            grown = self._rows.new_empty(max(num_rows, 2 * self._num_rows), self._rows.shape[1])
            grown[: self._num_rows] = self._rows[: self._num_rows]
            self._rows = grown
        self._rows[self._num_rows : num_rows] = rows
        self._num_rows = num_rows

    def complete(self, filler: Tensor) -> None:
        """Give later positions the row ``filler``, ``(width,)``; ``ValueError``: they have one."""
        if self.is_complete:
            raise ValueError("the rows had ended already")
        self._filler = filler.clone()
        self._filler_hash = content_hash(filler)

    def cut(self, start: int, stop: int) -> Tensor:
        """Rows ``(stop - start, width)`` of known positions; ``ValueError``: some are not known."""
        if self.num_known(stop) < stop:
            raise ValueError(f"rows [{start}, {stop}) were asked for, {self._num_rows} are known")
        rows = self._rows[min(start, self._num_rows) : min(stop, self._num_rows)]
        if self._filler is None or len(rows) == stop - start:
            return rows
        return torch.cat([rows, self._filler.expand(stop - start - len(rows), -1)])

    def apply(self, embeds: Tensor, start: int) -> None:
        """Turn token embeddings ``(n, width)`` of positions from ``start`` on into inputs.

        Where they are wider, rows are added to their last numbers.
        """
        rows = self.cut(start, start + embeds.shape[0]).to(embeds.device)
        num_replaced = min(max(0, self.num_replaced - start), embeds.shape[0])
        embeds[:num_replaced] = 0
        embeds[:, -rows.shape[1] :] += rows

    def spans(self, start: int, stop: int, block_size: int) -> tuple[ContentSpan, ...]:
        """What keys the blocks in ``[start, stop)``, all of it known; ``start`` is that of one.

        One span for each use of rows in a block: its hash must not depend on chunks, nor on what
        follows.
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
