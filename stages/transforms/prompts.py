"""Transforms between any two models: hidden states, text or token ids become the next prompt."""

from __future__ import annotations

import re

from engine import EmbedsPrompt, TextChunk, TextPrompt, TokensPrompt
from stages.stage import TransformContext
from stages.transforms.registry import chunkable, register_transform, requires

_SENTENCE_END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019\u00bb)\]]*(?=\s)|[\u3002\uff01\uff1f]+|\n"
)
_NO_END = re.compile(r"""(?:\b(?:Mrs?|Ms|Dr|Prof|St|vs|etc|No|e\.g|i\.e)|\b[A-Z]|(?:^|\s)\d+)\.$""")
"""What a point does not end: an abbreviation, an initial, the number of an item of a list."""


@register_transform("hidden_states_as_prompt_embeds")
@requires("hidden_states", same_width=True)
def hidden_states_as_prompt_embeds(context: TransformContext) -> EmbedsPrompt:
    """Feed the sources' hidden states in the place of token embeddings.

    Several sources' rows follow one another in the order of the sources: ``(n0 + n1 + ..., D)``.

    Raises:
        ValueError: a source handed on no hidden states, or their widths differ.
    """
    rows = [source.tensors["hidden_states"] for source in context.sources]
    widths = {
        source.stage: part.shape[-1] for source, part in zip(context.sources, rows, strict=True)
    }
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"stage {name!r} has {width}" for name, width in widths.items())
        raise ValueError(f"hidden states of different widths cannot be one prompt: {listed}")
    import torch  # only here: names of transforms are checked without it

    return EmbedsPrompt(torch.cat(rows) if len(rows) > 1 else rows[0])


@register_transform("text_as_prompt")
def text_as_prompt(context: TransformContext) -> TextPrompt:
    """Feed the sources' generated texts, joined as they are, to this stage's tokenizer.

    Raises:
        ValueError: a source makes no text, or all texts are empty.
    """
    texts = []
    for source in context.sources:
        if source.text is None:
            raise ValueError(f"stage {source.stage!r} makes no text to use as a prompt")
        texts.append(source.text)
    text = "".join(texts)
    if not text:
        raise ValueError(f"the text of {_names(context)} is empty and cannot be a prompt")
    return TextPrompt(text)


@register_transform("whole_sentences")
@requires(num_sources=1)
@chunkable
def whole_sentences(context: TransformContext) -> TextChunk:
    """Feed the source's text by whole sentences, so that a voice can begin with the first one.

    Raises:
        ValueError: the source makes no text.
    """
    (source,) = context.sources
    if source.text is None:
        raise ValueError(f"stage {source.stage!r} makes no text to split into sentences")
    text = source.text
    end = len(text) if context.is_last else 0
    for found in () if context.is_last else _SENTENCE_END.finditer(text):
        if not _NO_END.search(text, 0, found.end()):
            end = found.end()
    return TextChunk(text[:end], context.is_last, context.speaker)


@register_transform("token_ids_as_prompt")
def token_ids_as_prompt(context: TransformContext) -> TokensPrompt:
    """Feed the token ids that the sources generated, one source after the other.

    Raises:
        ValueError: no source generated a token.
    """
    token_ids = tuple(token for source in context.sources for token in source.token_ids)
    if not token_ids:
        raise ValueError(f"{_names(context)} generated no token ids to use as a prompt")
    return TokensPrompt(token_ids)


def _names(context: TransformContext) -> str:
    return " and ".join(f"stage {source.stage!r}" for source in context.sources)
