"""Transforms between the stages of a model that hears, thinks and speaks (Qwen Omni).

::

    thinker --thinker_to_talker--> talker --talker_to_code2wav--> code2wav
     text        what was read      codes       the codes
                 and replied

Those of Qwen3-Omni, whose talker draws several codes for a token, have ``qwen3_`` before their
names. All work on a source's whole output and on its chunks alike, and raise ``ValueError`` where
there is not one source, or it lacks what they require.
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
    """Let a talker speak what a thinker read and replied.

    A row is the sum of the token's embedding and its last hidden state: the one says which word
    it is, the other what it means where it stands (Qwen2.5-Omni, arXiv:2503.20215). With the
    thinker's ``row_keys`` among its outputs, the talker's cache knows them without hashing them.

    Raises:
        ValueError: the source handed on more rows of one tensor than of another.
    """
    hidden_states, token_embeds, places = _rows_of(
        context, "hidden_states", "token_embeds", "position_ids"
    )
    num_prompt_rows = _num_prompt_rows(context)
    keys = context.sources[0].tensors.get(ROW_KEYS) if num_prompt_rows else None
    prompt_keys = None if keys is None else keys[:num_prompt_rows]
    return _speech(context, hidden_states + token_embeds, places, prompt_keys=prompt_keys)


@register_transform("qwen3_thinker_to_talker")
@requires("speech_rows", "position_ids", "token_ids", num_sources=1)
@chunkable
def qwen3_thinker_to_talker(context: TransformContext) -> SpeechPrompt:
    """Let a talker speak what a thinker read and replied; see :func:`thinker_to_talker`."""
    rows, places, ids = _rows_of(context, "speech_rows", "position_ids", "token_ids")
    prompt_ids = tuple(ids[: _num_prompt_rows(context)].tolist())
    return _speech(context, rows, places, prompt_ids=prompt_ids)


@register_transform("talker_to_code2wav")
@requires(num_sources=1)
@chunkable
def talker_to_code2wav(context: TransformContext) -> CodecPrompt:
    """Let a vocoder sound what a talker generated, less the token that ended it."""
    (talker,) = context.sources
    is_ended = talker.finish_reason is FinishReason.STOP
    codes = talker.token_ids[:-1] if is_ended else talker.token_ids
    return _codec(context, codes, speaker=context.speaker)


@register_transform("qwen3_talker_to_code2wav")
@requires("codes", num_sources=1)
@chunkable
def qwen3_talker_to_code2wav(context: TransformContext) -> CodecPrompt:
    """Let a vocoder sound what a talker drew: the codes of every token but the last.

    The last one ended the speech, or is the one that reached ``max_tokens``, which transformers
    leaves out as well.
    """
    (talker,) = context.sources
    codes = tuple(map(tuple, _drawn(context, "codes").tolist()))
    return _codec(context, codes[:-1] if talker.finish_reason is FinishReason.LENGTH else codes)


@register_transform("csm_backbone_to_codec")
@requires("codes", num_sources=1)
@chunkable
def csm_backbone_to_codec(context: TransformContext) -> CodecPrompt:
    """Let a codec sound the frames that a backbone drew."""
    return _codec(context, tuple(map(tuple, _drawn(context, "codes").tolist())))


@register_transform("pocket_tts_to_codec")
@requires("latents", num_sources=1)
@chunkable
def pocket_tts_to_codec(context: TransformContext) -> CodecPrompt:
    """Let a codec sound the latents that Pocket TTS drew; codes are the bits of their numbers."""
    from engine.models.pocket_tts.codec import bits_of  # only here, as torch below

    return _codec(context, tuple(map(tuple, bits_of(_drawn(context, "latents")).tolist())))


def _drawn(context: TransformContext, name: str) -> Tensor:
    """The rows that came with generated tokens."""
    return context.sources[0].tensors[name][_num_prompt_rows(context) :]


def _rows_of(context: TransformContext, *names: str) -> list[Tensor]:
    """Tensors of one length that a thinker hands on; ``ValueError`` if they are not of one."""
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


def _speech(context: TransformContext, rows: Tensor, places: Tensor, **more: Any) -> SpeechPrompt:
    """A talker's prompt; ``places`` are ``(num_tokens, axes)``.

    Without positions if every token's place is its index, on all axes: a prompt of text and sound.
    """
    import torch  # only here: names of transforms are checked without it

    num_prompt_rows = _num_prompt_rows(context)
    places = places[:num_prompt_rows]
    indices = torch.arange(len(places), dtype=places.dtype)
    are_indices = bool((places == indices[:, None]).all())
    return SpeechPrompt(
        prompt_rows=rows[:num_prompt_rows],
        reply_rows=rows[num_prompt_rows:],
        positions=None if are_indices else places.T.contiguous(),
        speaker=context.speaker,
        is_last=context.is_last,
        **more,
    )


def _codec(context: TransformContext, codes: Any, speaker: str | None = None) -> CodecPrompt:
    is_cut_off = context.sources[0].finish_reason is FinishReason.LENGTH
    return CodecPrompt(codes, speaker=speaker, is_last=context.is_last, is_cut_off=is_cut_off)
