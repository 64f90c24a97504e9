"""Checked loading: a model is built on the meta device and compared with its files, then loaded.

An untrusted config may require more than its files contain, or be inconsistent. The headers of the
files show this before any memory is allocated.

Published checkpoints may also contain buffers that transformers computes now: frequencies of rotary
embeddings, position ids, filters. A stored name that matches no weight is looked up among the
non-persistent buffers of transformers' own class for the architecture, and not used::

    stored    vision_tower.vision_model.embeddings.position_ids
    class     model.vision_tower.embeddings.position_ids

Modules have moved between versions, so only the last two parts of a name are compared.
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
    """Return the unmatched stored names that are computed, or that transformers ignores.

    If there are any unmatched names, transformers' class is built on the meta device.
    """
    if not unplaced:
        return set()  # without importing transformers' modelling code
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
    """Return the last two parts of a name: those of a buffer and of its module."""
    return tuple(name.split(".")[-2:])


ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class LoadTargets:
    """Load targets of a model, by checkpoint name.

    Attributes:
        ignored: names that may be stored but are not used.
    """

    targets: Mapping[str, Target]
    ignored: frozenset[str] = frozenset()


def load_checked(
    checkpoint: Checkpoint,
    device: torch.device,
    build: Callable[[torch.device], ModelT],
    targets_of: Callable[[ModelT], LoadTargets],
    check: Callable[[ModelT], object] = lambda outline: None,
) -> ModelT:
    """Build a model and load its weights.

    Args:
        build: creates the model, its weights not yet loaded; called for ``meta`` first.
        check: raises if the model on ``meta`` cannot be used; called before weights are loaded.

    Raises:
        ValueError: the config is invalid, its weights do not match the stored ones, or memory is
            insufficient. No memory is allocated in these cases.
    """
    checkpoint.weight_files  # noqa: B018 - raises if the files are invalid
    with config_errors(checkpoint):
        outline = build(torch.device("meta"))
        wanted = targets_of(outline)
        rest = [n for n in checkpoint.unplaced(wanted.targets) if n not in wanted.ignored]
        ignored = wanted.ignored | computed_names(checkpoint, rest)
    checkpoint.check_weights(wanted.targets, ignored=ignored)
    require_memory(wanted.targets.values(), device, str(checkpoint.path))
    check(outline)
    model = build(device)
    checkpoint.load_into(targets_of(model).targets, ignored=ignored)
    return model


@contextmanager
def config_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Convert exceptions raised inside into errors that name the checkpoint's config file.

    Raises:
        ValueError: for any exception inside, except MemoryError and ShardError.
    """
    try:
        yield
    except (MemoryError, ShardError):
        raise
    # Inconsistent values make transformers' modules raise exceptions of any type.
    except Exception as error:
        raise ValueError(
            f"{checkpoint.config_file} asks for what cannot be: {describe(error)}"
        ) from error
