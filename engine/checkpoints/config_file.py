"""``config.json`` of strangers: read, checked, and made a config of transformers.

Only what could harm before a config is made is looked at here: what makes transformers run code,
read other files or build endless lists. Then come the values, in :mod:`config_values`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from engine.checkpoints.config_values import check_values
from engine.checkpoints.quiet_transformers import quiet_config_log
from engine.files.json_file import read_json_object

__all__ = ["CONFIG_FILE", "describe", "load_config", "read_config_file"]

CONFIG_FILE = "config.json"

# Lists as long as these are made before any value is looked at.
_MOST_LAYERS = 4096
_MOST_LABELS = 2**20
_REFUSED = {
    "configuration_files": "names other files to take this one's place, which is not supported",
    "quantization_config": "says that weights are quantized, which is not supported",
}


def read_config_file(folder: Path) -> dict[str, Any]:
    """Read the ``config.json`` of a checkpoint.

    Raises:
        ValueError: it is not there, is no such JSON as :func:`read_json_object` takes, or holds a
            key that cannot be; names the file and the key.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no {CONFIG_FILE}")
    content = read_json_object(file)
    for place, key, value in _entries(content):
        where = f"{file}: {place}{key}"
        if key in ("model_type", "architectures"):
            _check_names(where, value, is_list=key == "architectures")
        elif key in ("id2label", "label2id") and not isinstance(value, dict | None):
            raise ValueError(f"{where} must be an object, got {value!r}")
        elif key in ("dtype", "torch_dtype"):
            _check_dtype(where, value)
        if key in _REFUSED and value is not None:
            raise ValueError(f"{where} {_REFUSED[key]}")
        if key in _reserved():
            raise ValueError(f"{where} is the name of a method of transformers' configs")
        if key == "num_labels":
            _check_length(where, value, _MOST_LABELS)
        elif key == "depth" or key.endswith("layers"):
            _check_length(where, value, _MOST_LAYERS)
    return content


def load_config(folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Make a config of transformers of a ``config.json`` that was read before.

    Args:
        folder: of the checkpoint.
        trust_remote_code: whether it may come with its own Python code.

    Raises:
        ValueError: transformers does not know it, or a value of it cannot be; names the file.
    """
    file = folder / CONFIG_FILE
    try:
        with quiet_config_log():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                folder,
                trust_remote_code=trust_remote_code,
                local_files_only=not trust_remote_code,
            )
        # A stranger's choice could be code that is fetched from the hub.
        config._attn_implementation = None
        config._experts_implementation = None
        check_values(config)
        return config
    # Values of a wrong kind make transformers' classes raise whatever they stumble over.
    except Exception as error:
        raise ValueError(f"{file} cannot be used: {describe(error)}") from error


def describe(error: Exception) -> str:
    """An error's message, with its kind where that is part of what it says."""
    return (
        str(error)
        if isinstance(error, OSError | ValueError)
        else f"{type(error).__name__}: {error}"
    )


def _entries(content: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every key of an object and of the objects in it, behind the place where it is."""
    for key, value in content.items():
        yield place, key, value
        if isinstance(value, dict):
            yield from _entries(value, f"{place}{key}.")


@cache
def _reserved() -> frozenset[str]:
    """Names that hide a method of a config, or tables that belong to its class."""
    names = {name for name in dir(PreTrainedConfig) if callable(getattr(PreTrainedConfig, name))}
    return frozenset(names | {"attribute_map", "sub_configs", "sub_configs_defaults"})


def _check_names(where: str, value: Any, *, is_list: bool) -> None:
    names = [] if value is None else value if is_list else [value]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        kind = "a list of names" if is_list else "a name"
        raise ValueError(f"{where} must be {kind}, got {value!r}")


def _check_dtype(where: str, value: Any) -> None:
    # Of composed models an object, by the names of their parts.
    for each in value.values() if isinstance(value, dict) else [value]:
        name = each.removeprefix("torch.") if isinstance(each, str) else ""
        if each is not None and name != "auto" and not _is_float(name):
            raise ValueError(f"{where} must be a type of torch's for numbers, got {value!r}")


def _is_float(name: str) -> bool:
    found = getattr(torch, name, None)
    return isinstance(found, torch.dtype) and found.is_floating_point


def _check_length(where: str, value: Any, most: int) -> None:
    if isinstance(value, int | float) and not -most <= value <= most:
        raise ValueError(f"{where} must be at most {most}, got {value}")
