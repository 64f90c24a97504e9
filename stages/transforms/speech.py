"""Transforms between the stages of speech models, such as Qwen Omni.

::

    thinker --thinker_to_talker--> talker --talker_to_code2wav--> code2wav
     text        what was read      codes       the codes
                 and replied

Names of transforms for Qwen3-Omni, whose talker samples several codes per token, begin with
``qwen3_``. All transforms work on whole outputs and on chunks, and raise ``ValueError`` unless
there is exactly one source with the required tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine import CodecPrompt, FinishReason, SpeechPrompt
from engine.interface.outputs import ROW_KEYS
from stages.stage import TransformContext
from stages.transforms.registry import chunkable, register_transform, requires

if TYPE_CHECKING:
    from torch import Tensor


@register_transform("thinker_to_talker")
@requires("hidden_states", "token_embeds", "position_ids", num_sources=1)
@chunkable
def thinker_to_talker(context: TransformContext) -> SpeechPrompt:
    """Make a talker's prompt from a thinker's prompt and reply.

    A row is the sum of the token's embedding, which identifies the word, and its last hidden state,
    which has its meaning in context (Qwen2.5-Omni, arXiv:2503.20215). If the thinker outputs
    ``row_keys``, the talker's cache identifies rows by them instead of hashing the rows.

    Raises:
        ValueError: the source's tensors have different numbers of rows.
    """
    hidden_states, token_embeds, positions = _rows_of(
        context, "hidden_states", "token_embeds", "position_ids"
    )
    num_prompt_rows = _num_prompt_rows(context)
    keys = context.sources[0].tensors.get(ROW_KEYS) if num_prompt_rows else None
    prompt_keys = None if keys is None else keys[:num_prompt_rows]
    return _speech(context, hidden_states + token_embeds, positions, prompt_keys=prompt_keys)


@register_transform("qwen3_thinker_to_talker")
@requires("speech_rows", "position_ids", "token_ids", num_sources=1)
@chunkable
def qwen3_thinker_to_talker(context: TransformContext) -> SpeechPrompt:
    """Make a talker's prompt from a thinker's outputs; see :func:`thinker_to_talker`."""
    rows, positions, ids = _rows_of(context, "speech_rows", "position_ids", "token_ids")
    prompt_ids = tuple(ids[: _num_prompt_rows(context)].tolist())
    return _speech(context, rows, positions, prompt_ids=prompt_ids)


@register_transform("talker_to_code2wav")
@requires(num_sources=1)
@chunkable
def talker_to_code2wav(context: TransformContext) -> CodecPrompt:
    """Make a vocoder's prompt from a talker's tokens, without the end token."""
    (talker,) = context.sources
    is_ended = talker.finish_reason is FinishReason.STOP
    codes = talker.token_ids[:-1] if is_ended else talker.token_ids
    return _codec(context, codes, speaker=context.speaker)


@register_transform("qwen3_talker_to_code2wav")
@requires("codes", num_sources=1)
@chunkable
def qwen3_talker_to_code2wav(context: TransformContext) -> CodecPrompt:
    """Make a vocoder's prompt from a talker's codes of all tokens but the last.

    The last token ended the speech, or reached ``max_tokens``, where transformers drops it, too.
    """
    (talker,) = context.sources
    codes = tuple(map(tuple, _reply_rows(context, "codes").tolist()))
    return _codec(context, codes[:-1] if talker.finish_reason is FinishReason.LENGTH else codes)


@register_transform("csm_backbone_to_codec")
@requires("codes", num_sources=1)
@chunkable
def csm_backbone_to_codec(context: TransformContext) -> CodecPrompt:
    """Make a codec's prompt from the frames of a backbone."""
    return _codec(context, tuple(map(tuple, _reply_rows(context, "codes").tolist())))


@register_transform("pocket_tts_to_codec")
@requires("latents", num_sources=1)
@chunkable
def pocket_tts_to_codec(context: TransformContext) -> CodecPrompt:
    """Make a codec's prompt from the latents of Pocket TTS; codes are the bits of their numbers."""
    from engine.models.pocket_tts.codec import bits_of  # lazily, like torch below

    return _codec(context, tuple(map(tuple, bits_of(_reply_rows(context, "latents")).tolist())))


def _reply_rows(context: TransformContext, name: str) -> Tensor:
    """Return the rows of generated tokens."""
    return context.sources[0].tensors[name][_num_prompt_rows(context) :]


def _rows_of(context: TransformContext, *names: str) -> list[Tensor]:
    """Return tensors of a thinker; ``ValueError`` if their lengths differ."""
    (thinker,) = context.sources
    tensors = [thinker.tensors[name] for name in names]
    lengths = [tensor.shape[0] for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"stage {thinker.stage!r} handed on {lengths} rows of {', '.join(names)}; "
            "they must be as many of each"
        )
    return tensors


def _num_prompt_rows(context: TransformContext) -> int:
    return max(context.sources[0].num_prompt_tokens - context.first_row, 0)


def _speech(context: TransformContext, rows: Tensor, positions: Tensor, **kw: Any) -> SpeechPrompt:
    """Build a talker's prompt; ``places`` are the positions ``(num_tokens, axes)``.

    Positions are omitted if they equal the token's index on all axes, as for text and audio.
    """
    import torch  # lazily: names of transforms are checked without it

    num_prompt_rows = _num_prompt_rows(context)
    positions = positions[:num_prompt_rows]
    indices = torch.arange(len(positions), dtype=positions.dtype)
    are_indices = bool((positions == indices[:, None]).all())
    return SpeechPrompt(
        prompt_rows=rows[:num_prompt_rows],
        reply_rows=rows[num_prompt_rows:],
        positions=None if are_indices else positions.T.contiguous(),
        speaker=context.speaker,
        is_last=context.is_last,
        **kw,
    )


def _codec(context: TransformContext, codes: Any, speaker: str | None = None) -> CodecPrompt:
    is_cut_off = context.sources[0].finish_reason is FinishReason.LENGTH
    return CodecPrompt(codes, speaker=speaker, is_last=context.is_last, is_cut_off=is_cut_off)
