"""Layout of a talker's inputs: a thinker's rows of user turns and of its reply, added to codes.

Turns are recognized by their start token and the role after it; system turns and earlier replies
are left out. With the reply ``r``, and E the embedding of a token of the thinker's vocabulary::

    row    users' turns | <start> assistant \\n | E(tts pad) x 4 ............... | E(tts bos) | s[0]
    code       -        |          -           | no think, think, /think, voice | pad        | bos

    then s[1], s[2], ... added to the sampled codes;        s = r[0] ... r[last], E(tts end),
                                                                E(tts pad), E(tts pad), ...

Positions of user turns are those in the thinker's prompt, shifted to close the gaps.

Source: ``Qwen3OmniMoeForConditionalGeneration.generate`` of transformers, with equal results except
that it fails for a reply of a single token, which has no rows: here s then contains no r; and that
its talker omits a video's own audio from positions: here they are the thinker's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.config_file import read_config_file
from engine.inputs.prompt_processor import PromptContent, PromptSources
from engine.inputs.prompt_tokens import check_rows
from engine.interface.prompts import Prompt
from engine.models.qwen2_5_omni.speakers import (
    SpeechPromptProcessor,
    check_positions,
    choose_voice,
    embeddings,
    positions_before,
)
from engine.requests.encoder_input import PromptPositions, StreamedRows

# Tokens that open the last turn: start token, role, end of line.
_NUM_OPENING = 3
# Codes after the opening: no-think, think, /think, voice, pad, bos.
_NUM_HEADER_CODES = 6
_NUM_OTHER_CODES = 1024
"""Number of last ids in a talker's vocabulary that are not audio codes, as in transformers."""

_PREFERRED = "Ethan"


def speakers_of(path: Path) -> tuple[str, ...]:
    """Return the capitalized names of a checkpoint's voices."""
    talker: Any = read_config_file(path).get("talker_config")
    voices = talker.get("speaker_id") if isinstance(talker, dict) else None
    return tuple(name.capitalize() for name in voices or ())


class Qwen3SpeechPrompts(SpeechPromptProcessor):
    """Lays out speech prompts; loads three rows of the thinker's weights.

    Raises ``ValueError`` if the checkpoint lacks voices or these rows.
    """

    def __init__(self, sources: PromptSources) -> None:
        checkpoint = sources.checkpoint
        config, whole = checkpoint.config, checkpoint.whole_config
        self._whole: Any = whole
        voices: dict[str, int] = config.speaker_id or {}
        self._voice_codes = {name.capitalize(): code for name, code in voices.items()}
        if not voices:
            raise ValueError(f"{checkpoint.path}: talker_config names no voices in speaker_id")
        self.speakers = tuple(self._voice_codes)
        token_ids = [whole.tts_bos_token_id, whole.tts_eos_token_id, whole.tts_pad_token_id]
        rows = embeddings(sources, token_ids, config.thinker_hidden_size)
        self._begin_row, self._end_row, self._pad_row = _mark_as_text(rows).split(1)
        self._item_ids = torch.tensor(
            [config.audio_token_id, config.image_token_id, config.video_token_id]
        )
        self._header = (
            config.codec_nothink_id,
            config.codec_think_bos_id,
            config.codec_think_eos_id,
        )
        self._pad, self._bos = config.codec_pad_id, config.codec_bos_id
        self._block_size = sources.limits.block_size
        end, size = config.codec_eos_token_id, config.text_config.vocab_size
        self.stop_token_ids = frozenset({end})
        self.suppress_token_ids = tuple(
            index for index in range(max(size - _NUM_OTHER_CODES, 0), size) if index != end
        )

    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """Lay out a prompt, or the first chunk of one."""
        prompt, rows, reply = self._read(prompt)
        ids = torch.tensor(prompt.prompt_ids, dtype=torch.int64)
        if len(ids) != len(rows):
            raise ValueError(f"prompt_ids must be {len(rows)}, one for each row, got {len(ids)}")
        kept, opening = self._turns(ids)
        rows[:, -1] = torch.isin(ids, self._item_ids)
        head = rows[torch.cat((kept, opening))]
        start = torch.cat((head, self._pad_row.expand(4, -1), self._begin_row, reply), dim=0)
        streamed_rows = StreamedRows(start, num_replaced=len(head))
        positions = self._positions(prompt.positions, kept, len(rows))
        codes = [self._pad] * len(head)
        name = prompt.speaker and prompt.speaker.capitalize()
        voice = self._voice_codes[choose_voice(name, tuple(self._voice_codes), _PREFERRED)]
        codes += [*self._header, voice, self._pad, self._bos]
        return self._content(codes, streamed_rows, positions, is_last=prompt.is_last)

    def _check(self, rows: object, name: str) -> Tensor:
        width, dtype = self._pad_row.shape[1] - 1, self._pad_row.dtype
        return _mark_as_text(check_rows(rows, name, width, dtype).cpu())

    def _turns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of user turns, and of the tokens that open the reply."""
        starts = ids == self._whole.im_start_token_id
        number = starts.cumsum(0) - 1
        begins = starts.nonzero().flatten()
        roles = ids[(begins + 1).clamp(max=len(ids) - 1)]
        replies = begins[roles == self._whole.assistant_token_id]
        if not len(replies):
            raise ValueError("the prompt has no assistant's turn to speak: use the chat template")
        is_user = (roles == self._whole.user_token_id)[number.clamp(min=0)] & (number >= 0)
        opening = torch.arange(int(replies[-1]), len(ids))
        if len(opening) != _NUM_OPENING:
            raise ValueError(
                "only a reply from its beginning is spoken: the prompt must end with the opening "
                f"of an assistant's turn ({_NUM_OPENING} tokens), but ends with {len(opening)} "
                "tokens of one; leave out continue_final_message and add_generation_prompt"
            )
        return is_user.nonzero().flatten(), opening

    def _positions(self, table: object, kept: Tensor, num_rows: int) -> PromptPositions | None:
        if table is None or not len(kept):
            return None
        table, moved, place = check_positions(table, num_rows), [], 0
        ends = (kept.diff() != 1).nonzero().flatten() + 1
        for turn in kept.tensor_split(ends):
            # A turn begins with text, whose positions are equal on all axes.
            moved.append(table[:, turn] - table[0, turn[0]] + place)
            place = int(moved[-1][:, -1].max()) + 1
        return positions_before(torch.cat(moved, dim=1), _NUM_OPENING + _NUM_HEADER_CODES)


def _mark_as_text(rows: Tensor) -> Tensor:
    """Append the zero that marks rows of text."""
    return torch.nn.functional.pad(rows, (0, 1))
