"""Values that a config of transformers may have, whatever the family, by the names of its fields.

Transformers checks their types. What it lets pass is caught here, before anything is made of it:
sizes that are 0, negative or beyond all that fits into a machine, and factors that are no numbers.
Whether sizes fit the weights is known when the weights are looked at.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

from engine.checkpoints.activation import check_activation

__all__ = ["check_values"]

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
