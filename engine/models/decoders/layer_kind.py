"""How the layers of one decoder differ from each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

__all__ = ["LayerKind", "layer_kinds"]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What is particular to one layer.

    Attributes:
        window: how many positions a token sees, itself included; None: all before it.
        rope: which of :attr:`DecoderConfig.ropes` turns its heads.
    """

    window: int | None = None
    rope: int = 0


def layer_kinds(
    config: PreTrainedConfig, ropes: Sequence[str | None] = (None,)
) -> tuple[LayerKind, ...]:
    """Read ``layer_types`` and ``sliding_window``.

    ``sliding_window`` alone decides nothing: configs state it also where no layer slides.

    Args:
        config: of a family whose ``layer_types`` transformers fills in and obeys.
        ropes: layer types that have rope parameters of their own, in the order in which the
            model holds them; others take the first.

    Raises:
        ValueError: a layer type other than full and sliding attention, or no window to slide.
    """
    kinds = []
    for index, layer_type in enumerate(config.layer_types):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer {index} of {type(config).__name__} is {layer_type!r}; "
                "supported are 'full_attention' and 'sliding_attention'"
            )
        window = config.sliding_window if layer_type == "sliding_attention" else None
        if layer_type == "sliding_attention" and window is None:
            raise ValueError(
                f"layer {index} of {type(config).__name__} is 'sliding_attention', "
                "but sliding_window is None"
            )
        kinds.append(LayerKind(window, ropes.index(layer_type) if layer_type in ropes else 0))
    return tuple(kinds)
