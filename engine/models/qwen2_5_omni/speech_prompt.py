"""What a talker reads: a thinker's rows, laid beside codec tokens.

With n prompt rows and a reply ``r``, and E a token of the thinker's vocabulary, embedded::

    position   0 ... n-1      n             n+1           n+2 .......... n+2+j
    token      mask           pad           bos           first codec    codec j
    row        prompt_rows    E(speaker)    s[0]          s[1]           s[j+1]
               alone          |<- added to the token's own embedding ---------->|

    s = r[0] ... r[last], E(text end), E(text pad), E(text pad), ...

Source: ``Qwen2_5OmniForConditionalGeneration.generate`` of transformers, whose result this is.
There the reply of a single token, which has no rows, raises; here it is s without any r.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.inputs.multimodal_data import refuse_items
from engine.inputs.prompt_processor import PromptContent, PromptProcessor, PromptSources
from engine.inputs.prompt_tokens import check_rows
from engine.interface.prompts import Prompt, SpeechPrompt
from engine.models.qwen2_5_omni.speakers import load_speakers
from engine.requests.content_spans import position_spans
from engine.requests.prompt_positions import PromptPositions
from engine.requests.request import Request
from engine.requests.streamed_rows import StreamedRows

__all__ = ["SpeechPromptProcessor"]

_TEXT_EMBEDDING = "thinker.model.embed_tokens.weight"
_NUM_AXES = 3
_NUM_FOLLOWING = 2
"""Tokens of a talker's prompt after those of the thinker's: pad and bos."""


class SpeechPromptProcessor(PromptProcessor):
    """Lays out speech prompts.

    It reads the voices, and of the thinker's weights one row for each and two more.

    Args:
        sources: of a talker.

    Raises:
        ValueError: the checkpoint has no voices, or not these rows.
    """

    takes_chunks = True

    def __init__(self, sources: PromptSources) -> None:
        checkpoint, config = sources.checkpoint, sources.checkpoint.config
        voices = load_speakers(checkpoint.path)
        token_ids = [voices.get(name).bos_token for name in voices.names]
        token_ids += [config.tts_text_end_token_id, config.tts_text_pad_token_id]
        rows = check_rows(
            checkpoint.rows_of_whole(_TEXT_EMBEDDING, token_ids),
            _TEXT_EMBEDDING,
            config.embedding_size,
            sources.limits.dtype,
        )
        *starts, self._end_row, self._pad_row = rows.split(1)
        self._speaker_rows = dict(zip(voices.names, starts, strict=True))
        self._speakers, self.speakers = voices, voices.names
        self._block_size = sources.limits.block_size
        # The mask stands where the thinker's prompt does, and pad follows it.
        self._mask, self._pad = config.tts_codec_mask_token_id, config.tts_codec_pad_token_id
        self._bos = config.tts_codec_start_token_id
        # Where pad is generated, the speech has ended; bos begins it, and is never generated.
        self.stop_token_ids = frozenset({self._pad, config.tts_codec_end_token_id})
        self.suppress_token_ids = (self._bos,)

    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """Lay out a prompt, or the first chunk of one.

        Raises:
            ValueError: it is no speech prompt, has no row, or rows or places that cannot be; or
                no voice has the speaker's name.
        """
        refuse_items(prompt)
        if not isinstance(prompt, SpeechPrompt):
            raise ValueError(
                f"a talker reads the rows of a thinker, a SpeechPrompt; got {type(prompt).__name__}"
            )
        rows = self._check(prompt.prompt_rows, "prompt_rows")
        reply = self._check(prompt.reply_rows, "reply_rows")
        num_rows = rows.shape[0]
        if num_rows == 0:
            raise ValueError("the prompt is empty: prompt_rows needs at least one row")
        speaker = self._speakers.get(prompt.speaker)
        start = torch.cat([rows, self._speaker_rows[speaker.name], reply])
        streamed_rows = StreamedRows(start, num_replaced=num_rows)
        if prompt.is_last:
            self._end(streamed_rows)
        positions = _positions(prompt.positions, num_rows)
        return PromptContent(
            [self._mask] * num_rows + [self._pad, self._bos],
            () if positions is None else position_spans(positions, self._block_size),
            positions=positions,
            streamed_rows=streamed_rows,
        )

    def extend(self, request: Request, prompt: Prompt) -> None:
        """Take a later chunk. Its speaker counts for nothing: the first chunk's speaks.

        Raises:
            ValueError: it is no speech prompt, holds what only a first chunk may, or rows that
                cannot be; or the last chunk came before. Nothing has changed then.
        """
        streamed_rows = request.streamed_rows
        if streamed_rows is None:
            raise ValueError(f"request {request.request_id!r} has no rows that could go on")
        if not isinstance(prompt, SpeechPrompt):
            raise ValueError(f"a speech goes on with a SpeechPrompt, got {type(prompt).__name__}")
        num_rows = self._check(prompt.prompt_rows, "prompt_rows").shape[0]
        if num_rows or prompt.positions is not None:
            raise ValueError(
                f"prompt_rows and positions belong into the first chunk of a speech; a later one "
                f"came with {num_rows} rows"
            )
        reply = self._check(prompt.reply_rows, "reply_rows")
        streamed_rows.extend(reply)
        if prompt.is_last:
            self._end(streamed_rows)

    def _end(self, streamed_rows: StreamedRows) -> None:
        streamed_rows.extend(self._end_row)
        streamed_rows.complete(self._pad_row[0])

    def _check(self, rows: object, name: str) -> Tensor:
        width, dtype = self._pad_row.shape[1], self._pad_row.dtype
        return check_rows(rows, name, width, dtype).cpu()


def _positions(table: object, num_rows: int) -> PromptPositions | None:
    if table is None:
        return None
    if not isinstance(table, Tensor) or table.dtype != torch.int64:
        kind = table.dtype if isinstance(table, Tensor) else type(table).__name__
        raise ValueError(f"positions must be an int64 tensor, got {kind}")
    if table.shape != (_NUM_AXES, num_rows):
        raise ValueError(
            f"positions must be ({_NUM_AXES}, {num_rows}), a column for each of prompt_rows, "
            f"got {tuple(table.shape)}"
        )
    table = table.cpu()
    if int(table.min()) < 0:
        raise ValueError(f"positions must not be negative, got {int(table.min())}")
    if torch.equal(table, torch.arange(num_rows).expand_as(table)):
        return None
    follow = table[:, -1].max() + torch.arange(1, _NUM_FOLLOWING + 1)
    placed = PromptPositions.of(torch.cat([table, follow.expand(_NUM_AXES, -1)], dim=1))
    # Transformers' talker goes on after the largest of all, unlike its thinker.
    return replace(placed, shift=placed.largest + 1 - placed.table.shape[1])
