"""Transforms between the stages of a model that hears, thinks and speaks (Qwen2.5-Omni).

::

    thinker --thinker_to_talker--> talker --talker_to_code2wav--> code2wav
     text        what was read       codec        the codes
                 and replied         tokens

Both work on a source's whole output and on its chunks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine import CodecPrompt, FinishReason, SpeechPrompt
from engine.interface.outputs import ROW_KEYS
from stages.stage import StageOutput, TransformContext
from stages.transforms.registry import chunkable, register_transform, requires

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rows_of", "talker_to_code2wav", "thinker_to_talker"]

_THINKER_TENSORS = ("hidden_states", "token_embeds", "position_ids")
"""What a thinker has to hand on to a talker."""


@register_transform("thinker_to_talker")
@requires(*_THINKER_TENSORS, num_sources=1)
@chunkable
def thinker_to_talker(context: TransformContext) -> SpeechPrompt:
    """Let a talker speak what a thinker read and replied.

    A row is the sum of the token's embedding and its last hidden state: the one says which word
    it is, the other what it means where it stands (Qwen2.5-Omni, arXiv:2503.20215). With the
    thinker's ``row_keys`` among its outputs, the talker's cache knows them without hashing them.

    Raises:
        ValueError: there is not one source, or it did not hand on what is declared, of one length.
    """
    (thinker,) = context.sources
    hidden_states, token_embeds, position_ids = rows_of(thinker, _THINKER_TENSORS)
    rows = hidden_states + token_embeds
    num_prompt_rows = max(thinker.num_prompt_tokens - context.first_row, 0)
    keys = thinker.tensors.get(ROW_KEYS) if num_prompt_rows else None
    return SpeechPrompt(
        prompt_rows=rows[:num_prompt_rows],
        reply_rows=rows[num_prompt_rows:],
        positions=_positions(position_ids[:num_prompt_rows]),
        speaker=context.speaker,
        is_last=context.is_last,
        prompt_keys=None if keys is None else keys[:num_prompt_rows],
    )


@register_transform("talker_to_code2wav")
@requires(num_sources=1)
@chunkable
def talker_to_code2wav(context: TransformContext) -> CodecPrompt:
    """Let a vocoder sound what a talker generated, less the token that ended it.

    Raises:
        ValueError: there is not one source.
    """
    (talker,) = context.sources
    codes = talker.token_ids
    if talker.finish_reason is FinishReason.STOP:
        codes = codes[:-1]
    return CodecPrompt(
        codes,
        speaker=context.speaker,
        is_last=context.is_last,
        is_cut_off=talker.finish_reason is FinishReason.LENGTH,
    )


def rows_of(thinker: StageOutput, names: Sequence[str]) -> list[Tensor]:
    """Tensors of one length that a thinker hands on; ``ValueError`` if they are not of one."""
    tensors = [thinker.tensors[name] for name in names]
    lengths = [tensor.shape[0] for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"stage {thinker.stage!r} handed on {lengths} rows of {', '.join(names)}; "
            "they must be as many of each"
        )
    return tensors


def _positions(position_ids: Tensor) -> Tensor | None:
    """Turn places ``(num_prompt_tokens, axes)`` into ``(axes, num_prompt_tokens)``.

    None if every token's place is its index, on all axes: a prompt of text and sound alone.
    """
    import torch  # only here: names of transforms are checked without it

    indices = torch.arange(position_ids.shape[0], dtype=position_ids.dtype)
    if bool((position_ids == indices[:, None]).all()):
        return None
    return position_ids.T.contiguous()
