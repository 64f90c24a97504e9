"""Makes configs of transformers of ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from engine.checkpoints.config_checks import check_config, check_content, check_generation
from engine.checkpoints.quiet_transformers import quiet_config_log
from engine.files.json_file import read_json_object
from engine.interface.sampling_params import checkpoint_defaults

__all__ = ["CONFIG_FILE", "describe", "load_config", "load_generation_config", "read_config_file"]

CONFIG_FILE = "config.json"
_GENERATION = "generation_config.json"


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
    check_content(file, content)
    return content


def load_config(folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Make a config of transformers of a ``config.json`` that was read before.

    Args:
        folder: of the checkpoint.
        trust_remote_code: whether it may come with its own Python code.

    Raises:
        ValueError: transformers does not know it, or a value of it cannot be; names the file.
    """
    try:
        with quiet_config_log():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                folder,
                trust_remote_code=trust_remote_code,
                local_files_only=not trust_remote_code,
            )
        # The file's choice could be code that is fetched from the hub.
        config._attn_implementation = None
        config._experts_implementation = None
        check_config(config)
        return config
    # Values of a wrong kind make transformers' classes raise whatever they stumble over.
    except Exception as error:
        raise ValueError(f"{folder / CONFIG_FILE} cannot be used: {describe(error)}") from error


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """Make transformers' config of ``generation_config.json``; None where there is none.

    Raises:
        ValueError: it is no JSON, or transformers or we cannot use a value of it; names the file.
    """
    file = folder / _GENERATION
    if not file.is_file():
        return None
    content = read_json_object(file)
    check_generation(file, content)
    try:
        checkpoint_defaults(content)
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    # Values of a wrong kind make transformers raise whatever it stumbles over.
    except Exception as error:
        raise ValueError(f"{file} cannot be used: {describe(error)}") from error


def describe(error: Exception) -> str:
    """An error's message, with its kind where that is part of what it says."""
    return (
        str(error)
        if isinstance(error, OSError | ValueError)
        else f"{type(error).__name__}: {error}"
    )
