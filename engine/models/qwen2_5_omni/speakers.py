"""Voices of a checkpoint, and the layout of a talker's inputs.

A talker reads a thinker's rows together with codec tokens. With n prompt rows, a reply ``r``, and
E the embedding of a token of the thinker's vocabulary::

    position   0 ... n-1      n             n+1           n+2 .......... n+2+j
    token      mask           pad           bos           first codec    codec j
    row        prompt_rows    E(speaker)    s[0]          s[1]           s[j+1]
               only           |<- added to the token's own embedding ---------->|

    s = r[0] ... r[last], E(text end), E(text pad), E(text pad), ...

Source: ``Qwen2_5OmniForConditionalGeneration.generate`` of transformers, with equal results, except
that it fails for a reply of a single token, which has no rows: here s then contains no r.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.weight_files import WeightFiles
from engine.inputs.prompt_processor import (
    PromptContent,
    PromptProcessor,
    PromptSources,
    refuse_items,
)
from engine.inputs.prompt_tokens import check_rows
from engine.interface.prompts import Prompt, SpeechPrompt
from engine.requests.encoder_input import PromptPositions, StreamedRows, position_spans
from engine.requests.request import Request

_TEXT_EMBEDDING = "thinker.model.embed_tokens.weight"
_NUM_AXES = 3
_NUM_FOLLOWING = 2
"""Tokens in a talker's prompt after the thinker's tokens: pad and bos."""


class SpeechPromptProcessor(PromptProcessor):
    """Lays out speech prompts.

    It loads the voices, and from the thinker's weights one row per voice and two more; raises
    ``ValueError`` if the checkpoint lacks them.
    """

    takes_chunks = True

    def __init__(self, sources: PromptSources) -> None:
        config = sources.checkpoint.config
        self._voices = load_speakers(sources.checkpoint.path)
        self.speakers = tuple(self._voices)
        token_ids = [voice.bos_token for voice in self._voices.values()]
        token_ids += [config.tts_text_end_token_id, config.tts_text_pad_token_id]
        rows = embeddings(sources, token_ids, config.embedding_size)
        *starts, self._end_row, self._pad_row = rows.split(1)
        self._speaker_rows = dict(zip(self.speakers, starts, strict=True))
        self._block_size = sources.limits.block_size
        # The mask stands in for the thinker's prompt, and pad follows it.
        self._mask, self._pad = config.tts_codec_mask_token_id, config.tts_codec_pad_token_id
        self._bos = config.tts_codec_start_token_id
        # Pad ends the speech if generated; bos begins it, and is never generated.
        self.stop_token_ids = frozenset({self._pad, config.tts_codec_end_token_id})
        self.suppress_token_ids = (self._bos,)

    def process(self, prompt: Prompt, *, cache_salt: str | None = None) -> PromptContent:
        """Lay out a prompt, or the first chunk of one."""
        prompt, rows, reply = self._read(prompt)
        num_rows = rows.shape[0]
        speaker = find_speaker(self._voices, prompt.speaker)
        start = torch.cat([rows, self._speaker_rows[speaker.name], reply])
        streamed_rows = StreamedRows(
            start, num_replaced=num_rows, keys=_keys(prompt.prompt_keys, num_rows)
        )
        positions = None
        if prompt.positions is not None:
            table = check_positions(prompt.positions, num_rows)
            positions = positions_before(table, _NUM_FOLLOWING)
        codes = [self._mask] * num_rows + [self._pad, self._bos]
        return self._content(codes, streamed_rows, positions, is_last=prompt.is_last)

    def _content(
        self,
        codes: list[int],
        streamed_rows: StreamedRows,
        positions: PromptPositions | None,
        *,
        is_last: bool,
    ) -> PromptContent:
        if is_last:
            self._end(streamed_rows)
        spans = () if positions is None else position_spans(positions, self._block_size)
        return PromptContent(codes, spans, positions=positions, streamed_rows=streamed_rows)

    def _read(self, prompt: Prompt) -> tuple[SpeechPrompt, Tensor, Tensor]:
        """Return a prompt, or its first chunk, and its checked rows."""
        refuse_items(prompt)
        if not isinstance(prompt, SpeechPrompt):
            raise ValueError(
                f"a talker reads the rows of a thinker, a SpeechPrompt; got {type(prompt).__name__}"
            )
        rows = self._check(prompt.prompt_rows, "prompt_rows")
        reply = self._check(prompt.reply_rows, "reply_rows")
        if not len(rows):
            raise ValueError("the prompt is empty: prompt_rows needs at least one row")
        return prompt, rows, reply

    def extend(self, request: Request, prompt: Prompt) -> None:
        """Append a later chunk. Its speaker is ignored in favour of the first chunk's."""
        streamed_rows = request.streamed_rows
        if streamed_rows is None:
            raise ValueError(f"request {request.request_id!r} has no rows that could go on")
        if not isinstance(prompt, SpeechPrompt):
            raise ValueError(f"a speech goes on with a SpeechPrompt, got {type(prompt).__name__}")
        num_rows = self._check(prompt.prompt_rows, "prompt_rows").shape[0]
        if num_rows or prompt.positions is not None or prompt.prompt_keys is not None:
            raise ValueError(
                "prompt_rows and positions belong into the first chunk of a speech, and keys of "
                f"these rows; a later one came with {num_rows} rows"
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


def embeddings(sources: PromptSources, token_ids: Sequence[int], width: int) -> Tensor:
    """Read and check a thinker's embeddings of some tokens, ``(n, width)``."""
    rows = WeightFiles(sources.checkpoint.path).rows(_TEXT_EMBEDDING, token_ids)
    return check_rows(rows, _TEXT_EMBEDDING, width, sources.limits.dtype)


def _int64(tensor: object, name: str) -> Tensor:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be an int64 tensor, got {kind}")
    return tensor.cpu()


def _keys(keys: object, num_rows: int) -> Tensor | None:
    if keys is None:
        return None
    table = _int64(keys, "prompt_keys")
    if table.ndim != 2 or len(table) != num_rows:
        raise ValueError(
            f"prompt_keys must be ({num_rows}, n), a row for each of prompt_rows, "
            f"got {tuple(table.shape)}"
        )
    return table


def check_positions(positions: object, num_rows: int) -> Tensor:
    """Return positions on the CPU; raise ``ValueError`` if they are not ``(3, num_rows)`` int64."""
    table = _int64(positions, "positions")
    if table.shape != (_NUM_AXES, num_rows):
        raise ValueError(
            f"positions must be ({_NUM_AXES}, {num_rows}), a column for each of prompt_rows, "
            f"got {tuple(table.shape)}"
        )
    if int(table.min()) < 0:
        raise ValueError(f"positions must not be negative, got {int(table.min())}")
    return table


def positions_before(table: Tensor, num_following: int) -> PromptPositions | None:
    """Append positions of text tokens to ``(3, n)``; return None if all equal their indices."""
    follow = table[:, -1].max() + torch.arange(1, num_following + 1)
    table = torch.cat([table, follow.expand(_NUM_AXES, -1)], dim=1)
    if torch.equal(table, torch.arange(table.shape[1]).expand_as(table)):
        return None
    placed = PromptPositions.of(table)
    # Unlike its thinker, transformers' talker continues after the largest position of all.
    return replace(placed, shift=placed.largest + 1 - table.shape[1])


SPEAKERS_FILE = "spk_dict.pt"
"""File with the voices of a Qwen Omni checkpoint. No pickled code is run: it is loaded with
``weights_only=True``, which builds tensors and plain containers and rejects everything else."""

_MAX_BYTES = 2**26
# The family's own default (``generate(speaker="Chelsie")`` in transformers).
_PREFERRED = "Chelsie"


@dataclass(frozen=True, slots=True, eq=False)
class Speaker:
    """One voice.

    Attributes:
        bos_token: text token whose embedding opens a reply in this voice.
        conditioning: ``(1, D)`` float32 embedding of the voice.
        reference_mel: ``(1, T, mel_dim)`` float32 spectrogram of a sample of the voice.
    """

    name: str
    bos_token: int
    conditioning: Tensor
    reference_mel: Tensor


def find_speaker(speakers: Mapping[str, Speaker], name: str | None) -> Speaker:
    """Return one of a checkpoint's voices; see :func:`choose_voice`."""
    return speakers[choose_voice(name, tuple(speakers), _PREFERRED)]


def choose_voice(name: object, names: Sequence[str], preferred: str) -> str:
    """Return the name of a voice; for None, the preferred one if it exists, else the first.

    Raises:
        ValueError: no voice has this name; the message lists the voices.
    """
    if name is None:
        return preferred if preferred in names else names[0]
    if not isinstance(name, str):
        raise ValueError(f"a speaker is chosen by name, got {type(name).__name__}")
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown speaker {name!r}{hint}; this checkpoint has {', '.join(names)}")
    return name


def load_speakers(path: Path) -> dict[str, Speaker]:
    """Read ``{name: {"bos_token": int, "cond": (1, D), "ref_mel": (1, T, mel_dim)}}``, in order.

    Args:
        path: a checkpoint's folder, or its ``spk_dict.pt``.

    Raises:
        ValueError: the file is missing, cannot be read, or has other contents.
    """
    file = path / SPEAKERS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} is missing: the checkpoint brings no voices, so it cannot speak")
    try:
        size = file.stat().st_size
        if size > _MAX_BYTES:
            raise ValueError(f"it has {size} bytes; voices have at most {_MAX_BYTES}")
        with zipfile.ZipFile(file) as archive:
            # ``torch.save`` never compresses.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed")
        # Mapped, so that no tensor can lie outside the file, whatever its metadata claims.
        content = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # Damaged files make the archive, the unpickler or torch raise any exception.
        raise ValueError(f"{file} cannot be read as a dictionary of speakers: {error}") from error
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{file} must map names to speakers, it holds a {type(content).__name__}")
    return {name: _speaker(file, name, entry) for name, entry in content.items()}


def _speaker(file: Path, name: object, entry: Any) -> Speaker:
    where = f"speaker {name!r} of {file}"
    wanted = {"bos_token", "cond", "ref_mel"}
    if not isinstance(name, str) or not isinstance(entry, Mapping) or not wanted <= entry.keys():
        raise ValueError(f"{where} must have a name and {', '.join(sorted(wanted))}")
    bos_token = entry["bos_token"]
    if not isinstance(bos_token, int) or isinstance(bos_token, bool) or bos_token < 0:
        raise ValueError(f"{where}: bos_token must be a token id, got {bos_token!r}")
    return Speaker(
        name=name,
        bos_token=bos_token,
        conditioning=_rows(f"{where}: cond", entry["cond"], 2),
        reference_mel=_rows(f"{where}: ref_mel", entry["ref_mel"], 3),
    )


def _rows(where: str, value: object, num_dims: int) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim != num_dims or len(value) != 1:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{where} must be a tensor of {num_dims} dimensions, 1 first, got {got}")
    if value.layout != torch.strided or value.is_meta or not value.is_floating_point():
        raise ValueError(f"{where} must hold plain floating-point numbers")
    # Strides can expand a few bytes to any shape, which might not fit into memory.
    if value.nbytes > value.untyped_storage().nbytes():
        raise ValueError(f"{where} has the shape {tuple(value.shape)}, but not as many numbers")
    if not value.numel() or not value.isfinite().all():
        raise ValueError(f"{where} must hold finite numbers")
    return value.to(torch.float32, copy=True)
