"""What a prompt shows beside its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from torch import Tensor

from engine.interface.prompts import ExplicitEncoderDecoderPrompt, Prompt
from engine.requests.multimodal_input import Modality

__all__ = ["MODALITIES", "items_of", "refuse_items"]

MODALITIES: tuple[Modality, ...] = get_args(Modality)
"""All of them."""


def items_of(
    prompt: Prompt, modalities: Sequence[Modality] = MODALITIES
) -> Mapping[Modality, Sequence[object]]:
    """The items in a prompt's ``multi_modal_data``; every modality has its list, if an empty one.

    Args:
        prompt: of any form.
        modalities: what may be shown.

    Raises:
        ValueError: ``multi_modal_data`` is no mapping, or shows something else, or not a list of
            items.
    """
    # Text, chat messages and token ids have some; no other form of prompt does.
    data: object = getattr(prompt, "multi_modal_data", {})
    if not isinstance(data, Mapping):
        raise ValueError(
            "multi_modal_data must be a mapping of modalities to lists of items, such as "
            f"{{'audio': ['question.wav']}}, got {type(data).__name__}"
        )
    unknown = sorted(set(data) - set(modalities))
    if unknown:
        raise ValueError(
            f"multi_modal_data has {', '.join(map(repr, unknown))}; "
            f"what can be shown is {', '.join(map(repr, modalities))}"
        )
    items: dict[Modality, Sequence[object]] = {}
    for modality in modalities:
        given = data.get(modality, ())
        if isinstance(given, str | bytes | Path | Tensor) or not isinstance(given, Sequence):
            raise ValueError(
                f"multi_modal_data[{modality!r}] must be a list of items, each {modality} one, "
                f"got {type(given).__name__}"
            )
        items[modality] = given
    return items


def refuse_items(prompt: Prompt) -> None:
    """Raise ``ValueError`` if a prompt, or either side of one, shows anything."""
    if isinstance(prompt, ExplicitEncoderDecoderPrompt):
        refuse_items(prompt.encoder_prompt)
        if prompt.decoder_prompt is not None:
            refuse_items(prompt.decoder_prompt)
        return
    shown = [f"{len(items)} {name} items" for name, items in items_of(prompt).items() if items]
    if shown:
        raise ValueError(
            f"the prompt shows {' and '.join(shown)} in multi_modal_data, but this model takes "
            "none there; a model whose encoder reads images or speech takes one as its encoder "
            "prompt, beside a decoder prompt"
        )
