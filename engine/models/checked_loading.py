"""Builds a model twice: without memory, to compare it with what is stored, and then to be loaded.

A config of a stranger may ask for more than its files hold, or for what cannot be. That is known
from the headers of the files, before memory is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.config_file import CONFIG_FILE, describe
from engine.models.computed_buffers import computed_names
from engine.resources.free_memory import require_memory

__all__ = ["Places", "load_checked", "told_of_config"]

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a model wants the tensors of its checkpoint.

    Attributes:
        targets: by the names of the checkpoint.
        ignored: names that may be stored although nothing needs them.
    """

    targets: Mapping[str, Tensor]
    ignored: frozenset[str] = frozenset()


def load_checked(
    checkpoint: Checkpoint,
    device: torch.device,
    build: Callable[[torch.device], ModelT],
    places_of: Callable[[ModelT], Places],
) -> ModelT:
    """Build a model and load its weights.

    Args:
        checkpoint: whose weights they are.
        device: where the model is to be.
        build: makes the model with any weights; is called for ``meta`` first.
        places_of: of such a model.

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
    except MemoryError:
        raise
    # Values that do not go together make transformers' modules raise whatever they stumble over.
    except Exception as error:
        file = checkpoint.path / CONFIG_FILE
        raise ValueError(f"{file} asks for what cannot be: {describe(error)}") from error
