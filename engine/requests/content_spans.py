"""What block hashes cover beside token ids: the inputs that no token tells."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.requests.encoder_input import EncoderInput
from engine.requests.multimodal_input import MultiModalInput
from engine.requests.prompt_positions import PromptPositions
from prefix_cache import ContentSpan, content_hash

__all__ = ["embeds_spans", "encoder_spans", "item_spans", "position_spans"]


def embeds_spans(prompt_embeds: Tensor, block_size: int) -> tuple[ContentSpan, ...]:
    """One span per block, so that two prompts share the blocks in which their rows agree.

    Args:
        prompt_embeds: ``(num_tokens, hidden_size)``, in the type the model will see.
        block_size: tokens per block.
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
    """One span per block of a prompt whose places nothing else of its content tells.

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
    """What tells placeholders of one image from those of another."""
    # Pieces of one video with its sound have one span together.
    return tuple(dict.fromkeys(item.span for item in items))


def encoder_spans(encoder_input: EncoderInput) -> tuple[ContentSpan, ...]:
    """What keys a decoder's blocks by the encoder's input, on which all of them depend.

    At the first position only: the hash of every later block covers that of the first.
    """
    return (ContentSpan("encoder_input", 0, 1, encoder_input.content_hash),)
