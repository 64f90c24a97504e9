"""The plain decoders on which families with towers build."""

from __future__ import annotations

from collections.abc import Mapping

from engine.models.decoders import llama, mistral, qwen2, qwen3
from engine.models.family import ModelFamily

__all__ = ["BASE_DECODERS"]

BASE_DECODERS: Mapping[str, ModelFamily] = {
    module.FAMILY.name: module.FAMILY for module in (llama, mistral, qwen2, qwen3)
}
"""By the ``model_type`` of their configs."""
