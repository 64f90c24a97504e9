"""What seeded checkpoints with recurrent layers need: small settings, and decays that remember."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from omni.seeded.weights import NOISE_STD

__all__ = ["HYBRID_SETTINGS", "initialise_recurrence"]

HYBRID_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # With four layers: Mamba, Mamba with experts, attention, Mamba with experts.
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
    },
    # With four layers: Mamba-2, attention, Mamba-2, Mamba-2.
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
    },
}
"""Config fields by transformers' model type, for a stream of any width that 8 divides."""

# With steps of about 0.13, as trained models have them, and rates of exp of these, a state loses
# between a fortieth and two fifths of itself at a token.
_STEP = -2.0
_SLOWEST, _FASTEST = -1.5, 1.5


def initialise_recurrence(name: str, parameter: nn.Parameter, generator: torch.Generator) -> bool:
    """Fill a parameter of a recurrence; False if it is none, and left alone.

    Decays are spread, so that some of the state still depends on the start of a long prompt: a
    test of caching has to notice a state that was lost.

    Args:
        name: in the model.
        parameter: filled in place.
        generator: of the noise.
    """
    if name.endswith("A_log"):
        centre = torch.linspace(_SLOWEST, _FASTEST, parameter.shape[-1]).expand_as(parameter)
    elif name.endswith(("dt_bias", "dt_proj.bias")):
        centre = torch.full_like(parameter, _STEP)
    elif name.endswith(".D"):
        centre = torch.ones_like(parameter)
    else:
        return False
    with torch.no_grad():
        parameter.normal_(0.0, NOISE_STD, generator=generator).add_(centre)
    return True
