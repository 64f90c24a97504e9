"""Builds a model twice: without memory, to compare it with what is stored, and then to be loaded.

An untrusted config may ask for more than its files hold, or for what cannot be. That is known
from the headers of the files, before memory is taken.

Tensors of published checkpoints that a model computes from its config, by transformers' module.

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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import transformers
from torch import nn

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.config_file import describe
from engine.checkpoints.quantized_weight import Target
from engine.layers import ShardError
from engine.resources.memory_plan import require_memory


def computed_names(checkpoint: Checkpoint, unplaced: Collection[str]) -> set[str]:
    """Which of the stored tensors that have no place are computed, or ignored by transformers.

    Transformers' class is built, without memory for its weights, if there is any such tensor.
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


ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a model wants the tensors of its checkpoint.

    Attributes:
        ignored: names that may be stored although nothing needs them.
    """

    targets: Mapping[str, Target]
    ignored: frozenset[str] = frozenset()


def load_checked(
    checkpoint: Checkpoint,
    device: torch.device,
    build: Callable[[torch.device], ModelT],
    places_of: Callable[[ModelT], Places],
) -> ModelT:
    """Build a model and load its weights.

    Args:
        build: makes the model with any weights; is called for ``meta`` first.

    Raises:
        ValueError: the config cannot be built, its weights are not those that are stored, or
            there is too little memory for them. Nothing was taken then.
    """
    checkpoint.weight_files  # noqa: B018 - says what is wrong with the files, if anything is
    with told_of_config(checkpoint):
        places = places_of(build(torch.device("meta")))
        rest = [n for n in checkpoint.unplaced(places.targets) if n not in places.ignored]
        ignored = places.ignored | computed_names(checkpoint, rest)
    checkpoint.check_weights(places.targets, ignored=ignored)
    require_memory(places.targets.values(), device, str(checkpoint.path))
    model = build(device)
    checkpoint.load_into(places_of(model).targets, ignored=ignored)
    return model


@contextmanager
def told_of_config(checkpoint: Checkpoint) -> Iterator[None]:
    """Say whose config it was that could not be read or built.

    Raises:
        ValueError: for whatever is raised inside.
    """
    try:
        yield
    except (MemoryError, ShardError):
        raise
    # Values that do not go together make transformers' modules raise whatever they stumble over.
    except Exception as error:
        raise ValueError(
            f"{checkpoint.config_file} asks for what cannot be: {describe(error)}"
        ) from error
