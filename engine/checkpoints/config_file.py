"""``config.json`` of strangers: read, checked, and made a config of transformers.

Only what could harm before a config is made is looked at here: what makes transformers run code,
read other files or build endless lists. Then come the values, in :mod:`config_values`.

Values that a config of transformers may have, whatever the family, by the names of its fields.

Transformers checks their types. What it lets pass is caught here, before anything is made of it:
sizes that are 0, negative or beyond all that fits into a machine, and factors that are no numbers.
Whether sizes fit the weights is known when the weights are looked at.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from engine.checkpoints.activation import check_activation
from engine.checkpoints.quiet_transformers import quiet_config_log
from engine.files.json_file import read_json_object

__all__ = ["CONFIG_FILE", "describe", "load_config", "read_config_file"]

_MOST = 2**31 - 1
# A spectrogram's rows for a code, or samples for a row of it: more would be no sound's.
_MOST_RATIO = 64

_COUNTS = re.compile(
    r"(num|n)_(hidden_layers|layers|heads|attention_heads|key_value_heads|channels|mel_bins|embeds)"
    r"|num_(decoder_layers|experts|experts_per_tok)|n_window|depth|dim|repeats|ff_mult"
    r"|(encoder|decoder)_(layers|attention_heads|ffn_dim)|attention_heads"
    r"|(hidden|intermediate|vocab|embedding|patch|spatial_merge|temporal_patch|window|image|block"
    r"|out_hidden)_size"
    r"|d_(model|ff|kv)|(head|hidden|emb|mel|output|vision_output|enc|enc_emb)_dim|in_channels"
    r"|enc_(channels|kernel_sizes|dilations|attention_channels|res2net_scale|se_channels)"
    r"|mamba_(d_state|d_conv|d_head|expand|n_heads|n_groups|dt_rank)|sliding_window"
    r"|max_(position_embeddings|source_positions|target_positions|num_tiles)|query_pre_attn_scalar"
    r"|relative_attention_num_buckets|(attn|expert)_layer_period|seconds_per_chunk"
    r"|upsample_(initial_channel|rates|kernel_sizes)|resblock_(kernel|dilation)_sizes"
    r"|supported_aspect_ratios"
)
# Each has a column in a table.
_DISTANCES, _MOST_DISTANCE = "relative_attention_max_distance", 2**16
_RATIOS = re.compile(r"repeats|upsample_rates|ff_mult|mamba_expand|spatial_merge_size")
_NATURALS = re.compile(
    r"num_global_layers|max_window_layers|(attn|expert)_layer_offset|fullatt_block_indexes"
    r"|intermediate_layers_indices|cross_attention_layers|attn_layer_indices"
    r"|look_(ahead|backward)_layers|(image|audio|video)_token_(id|index)|tts_\w+_token_id"
    r"|audio_(start|end)_token_id|vision_(start|end)_token_id|position_id_per_seconds|tokens_per_second"
)
_POSITIVE = re.compile(r"(attn_logit|final_logit)_softcapping")
_EPSILONS = re.compile(r"(rms_)?norm_eps|layer_norm_eps(ilon)?")
_ACTIVATIONS = re.compile(
    r"hidden_act(ivation)?|activation_function|activation|projector_hidden_act"
)


def check_values(config: PreTrainedConfig) -> None:
    """Check the fields of a config, and of the configs in it.

    Fields of classes that are not transformers' own are left to their authors.

    Raises:
        ValueError: a value cannot be; says which field of which part, what came and what may come.
    """
    for place, part in _parts(config):
        if not type(part).__module__.startswith("transformers."):
            continue
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if value is not None:
                _check(f"{place}{field.name}", field.name, value)


def _parts(config: PreTrainedConfig, place: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    yield place, config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _parts(part, f"{place}{name}.")


def _check(where: str, name: str, value: Any) -> None:
    if _COUNTS.fullmatch(name) and value != "auto":
        _check_integers(where, value, 1, _MOST_RATIO if _RATIOS.fullmatch(name) else _MOST)
    elif name == _DISTANCES:
        _check_integers(where, value, 1, _MOST_DISTANCE)
    elif _NATURALS.fullmatch(name):
        _check_integers(where, value, 0, _MOST)
    elif _POSITIVE.fullmatch(name) and not 0 < value < math.inf:
        raise ValueError(f"{where} must be a number above 0, got {value!r}")
    elif _EPSILONS.fullmatch(name) and not 0 <= value < 1:
        raise ValueError(f"{where} must be a number of at least 0 and below 1, got {value!r}")
    elif _ACTIVATIONS.fullmatch(name):
        check_activation(where, value)


def _check_integers(where: str, value: Any, least: int, most: int) -> None:
    """Of a single number, or of a list of such, of which some are pairs or triples."""
    if isinstance(value, list | tuple) and (value or least == 0):
        for index, each in enumerate(value):
            _check_integers(f"{where}[{index}]", each, least, most)
        return
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        raise ValueError(f"{where} must be an integer of {least} to {most}, got {value!r}")


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
