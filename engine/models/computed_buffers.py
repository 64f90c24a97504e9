"""Tensors of published checkpoints that a model computes from its config, by transformers' module.

Older versions stored buffers that newer ones compute: frequencies of rotary embeddings, numbers
of positions, filters. Which they are is no list of ours. A name in a checkpoint that no weight
answers to is looked up among the buffers that transformers' own class for the architecture holds
and does not store::

    stored    vision_tower.vision_model.embeddings.position_ids
    class     model.vision_tower.embeddings.position_ids

    stored    model.layers.0.self_attn.rotary_emb.inv_freq
    class     model.rotary_emb.inv_freq

Modules have moved between versions, so the last two parts of a name are compared. The stored
values are left alone, as transformers does.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from copy import deepcopy
from typing import Any

import torch
import transformers

from engine.checkpoints.checkpoint import Checkpoint

__all__ = ["computed_names"]


def computed_names(checkpoint: Checkpoint, unplaced: Collection[str]) -> set[str]:
    """Which of the stored tensors that have no place are computed, or ignored by transformers.

    Transformers' class is built, without memory for its weights, if there is any such tensor.

    Args:
        checkpoint: whose config and architecture tell the class.
        unplaced: names of its tensors.
    """
    if not unplaced:
        return set()  # without importing what transformers has for the architecture
    module_class: Any = getattr(transformers, checkpoint.architecture, None)
    if module_class is None:
        return set()
    with torch.device("meta"):
        module = module_class(deepcopy(checkpoint.config))
    weights = module.state_dict().keys()
    computed = {_tail(name) for name, _ in module.named_buffers() if name not in weights}
    ignored = module._keys_to_ignore_on_load_unexpected or ()
    return {
        name
        for name in unplaced
        if _tail(name) in computed or any(re.search(pattern, name) for pattern in ignored)
    }


def _tail(name: str) -> tuple[str, ...]:
    """The last two parts of a name: of a buffer and of what holds it."""
    return tuple(name.split(".")[-2:])
