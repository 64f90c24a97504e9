"""Transforms between the stages of a model that hears, sees, thinks and speaks (Qwen3-Omni).

::

    thinker --qwen3_thinker_to_talker--> talker --qwen3_talker_to_code2wav--> code2wav
     text        what was read            codes      the codes of all
                 and replied                         codebooks

Both work on a source's whole output and on its chunks alike.
"""

from __future__ import annotations

from engine import CodecPrompt, FinishReason, SpeechPrompt
from stages.stage import TransformContext
from stages.transforms.qwen2_5_omni import rows_of
from stages.transforms.registry import chunkable, register_transform, requires

__all__ = ["qwen3_talker_to_code2wav", "qwen3_thinker_to_talker"]

_THINKER_TENSORS = ("speech_rows", "position_ids", "token_ids")
"""What a thinker has to hand on to a talker."""


@register_transform("qwen3_thinker_to_talker")
@requires(*_THINKER_TENSORS, num_sources=1)
@chunkable
def qwen3_thinker_to_talker(context: TransformContext) -> SpeechPrompt:
    """Let a talker speak what a thinker read and replied.

    Raises:
        ValueError: there is not one source, or it did not hand on what is declared, of one length.
    """
    (thinker,) = context.sources
    rows, position_ids, token_ids = rows_of(thinker, _THINKER_TENSORS)
    num_prompt_rows = max(thinker.num_prompt_tokens - context.first_row, 0)
    places = position_ids[:num_prompt_rows].T.contiguous() if num_prompt_rows else None
    return SpeechPrompt(
        prompt_rows=rows[:num_prompt_rows],
        reply_rows=rows[num_prompt_rows:],
        positions=places,
        speaker=context.speaker,
        is_last=context.is_last,
        prompt_ids=tuple(token_ids[:num_prompt_rows].tolist()),
    )


@register_transform("qwen3_talker_to_code2wav")
@requires("codes", num_sources=1)
@chunkable
def qwen3_talker_to_code2wav(context: TransformContext) -> CodecPrompt:
    """Let a vocoder sound what a talker drew: the codes of every token but the last.

    The last one ended the speech, or a limit did before its other codes were of use.

    Raises:
        ValueError: there is not one source.
    """
    (talker,) = context.sources
    drawn = talker.tensors["codes"][max(talker.num_prompt_tokens - context.first_row, 0) :]
    return CodecPrompt(
        tuple(map(tuple, drawn.tolist())),
        is_last=context.is_last,
        is_cut_off=talker.finish_reason is FinishReason.LENGTH,
    )
