"""Transforms between any two models: use hidden states, text or token ids as the next prompt."""

from __future__ import annotations

import re

from engine import EmbedsPrompt, TextChunk, TextPrompt, TokensPrompt
from stages.stage import TransformContext
from stages.transforms.registry import chunkable, register_transform, requires

_SENTENCE_END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019\u00bb)\]]*(?=\s)|[\u3002\uff01\uff1f]+|\n"
)
_NO_END = re.compile(r"""(?:\b(?:Mrs?|Ms|Dr|Prof|St|vs|etc|No|e\.g|i\.e)|\b[A-Z]|(?:^|\s)\d+)\.$""")
"""Periods that do not end a sentence: after abbreviations, initials and list item numbers."""
_MAX_NO_END = 32  # characters


@register_transform("hidden_states_as_prompt_embeds")
@requires("hidden_states", same_width=True)
def hidden_states_as_prompt_embeds(context: TransformContext) -> EmbedsPrompt:
    """Use the sources' hidden states in place of token embeddings.

    The rows of several sources are concatenated in the sources' order: ``(n0 + n1 + ..., D)``.

    Raises:
        ValueError: a source output no hidden states, or their widths differ.
    """
    rows = [source.tensors["hidden_states"] for source in context.sources]
    widths = {
        source.stage: part.shape[-1] for source, part in zip(context.sources, rows, strict=True)
    }
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"stage {name!r} has {width}" for name, width in widths.items())
        raise ValueError(f"hidden states of different widths cannot be one prompt: {listed}")
    import torch  # lazily: names of transforms are checked without it

    return EmbedsPrompt(torch.cat(rows) if len(rows) > 1 else rows[0])


@register_transform("text_as_prompt")
def text_as_prompt(context: TransformContext) -> TextPrompt:
    """Use the concatenation of the sources' generated texts as the prompt.

    Raises:
        ValueError: a source generates no text, or all texts are empty.
    """
    texts = []
    for source in context.sources:
        if source.text is None:
            raise ValueError(f"stage {source.stage!r} makes no text to use as a prompt")
        texts.append(source.text)
    text = "".join(texts)
    if not text:
        raise ValueError(f"the text of {_source_names(context)} is empty and cannot be a prompt")
    return TextPrompt(text)


@register_transform("whole_sentences")
@requires(num_sources=1)
@chunkable
def whole_sentences(context: TransformContext) -> TextChunk:
    """Pass on the source's text by whole sentences, so that speech can begin with the first one.

    Raises:
        ValueError: the source generates no text.
    """
    (source,) = context.sources
    if source.text is None:
        raise ValueError(f"stage {source.stage!r} makes no text to split into sentences")
    text = source.text
    end = len(text) if context.is_last else 0
    found = [] if context.is_last else [match.end() for match in _SENTENCE_END.finditer(text)]
    for place in reversed(found):
        if not _NO_END.search(text, max(0, place - _MAX_NO_END), place):
            end = place
            break
    return TextChunk(text[:end], context.is_last, context.speaker)


@register_transform("token_ids_as_prompt")
def token_ids_as_prompt(context: TransformContext) -> TokensPrompt:
    """Use the concatenation of the sources' generated token ids as the prompt.

    Raises:
        ValueError: no source generated a token.
    """
    token_ids = tuple(token for source in context.sources for token in source.token_ids)
    if not token_ids:
        raise ValueError(f"{_source_names(context)} generated no token ids to use as a prompt")
    return TokensPrompt(token_ids)


def _source_names(context: TransformContext) -> str:
    return " and ".join(f"stage {source.stage!r}" for source in context.sources)
