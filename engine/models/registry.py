"""From a checkpoint's architecture name to a loaded model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig

from engine.checkpoint import Checkpoint
from engine.layers import LayerOps, RotaryEmbedding, can_pack, rope_frequencies
from engine.models.base import CausalModel
from engine.models.decoder import DecoderModel, ModelSettings
from engine.models.decoder_config import DecoderConfig
from engine.models.llama import llama_config
from engine.models.mistral import mistral_config
from engine.models.qwen2 import qwen2_config
from engine.models.qwen3 import qwen3_config

__all__ = ["SUPPORTED_ARCHITECTURES", "load_model"]

_FAMILIES: dict[str, Callable[[PreTrainedConfig], DecoderConfig]] = {
    "Llama": llama_config,
    "Mistral": mistral_config,
    "Qwen2": qwen2_config,
    "Qwen3": qwen3_config,
}
_WITH_HEAD = "ForCausalLM"
_HEADLESS = "Model"

SUPPORTED_ARCHITECTURES = tuple(
    family + suffix for family in _FAMILIES for suffix in (_WITH_HEAD, _HEADLESS)
)
"""Architecture names, as ``config.json`` states them, that :func:`load_model` takes."""


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    block_size: int,
    max_model_len: int,
    pack_weights: bool | None = None,
    ops: LayerOps | None = None,
) -> CausalModel:
    """Build a checkpoint's model and load its weights.

    Args:
        checkpoint: where from.
        dtype: of weights, activations and the KV cache.
        device: of the same.
        block_size: tokens per block of the KV cache.
        max_model_len: longest sequence that will run, in tokens.
        pack_weights: whether to hold weights in the CPU library's own layout, which is faster for
            batches and the same up to rounding; by default where that is possible.
        ops: what computes norms, gates and rotations; by default torch.

    Raises:
        ValueError: the architecture, or something that its config asks for, is not supported; or
            the weights do not fit the config.
    """
    device = torch.device(device)
    family, has_head = _family(checkpoint)
    config = _FAMILIES[family](checkpoint.config)
    _require_full_attention(config, checkpoint, max_model_len)
    packable = can_pack(device, dtype)
    if pack_weights and not packable:
        raise ValueError(f"weights are packed for float32 on a CPU only, not {dtype} on {device}")
    inv_freq, scaling = rope_frequencies(checkpoint.config, max_model_len)
    rotary = RotaryEmbedding(inv_freq, scaling, max_model_len, dtype=dtype, device=device)
    settings = ModelSettings(dtype, device, block_size, ops or LayerOps())
    model = DecoderModel(config, rotary, settings, has_head=has_head)
    # Some embedding models keep the headless names under a causal architecture.
    prefix = "model." if "model.embed_tokens.weight" in checkpoint.weight_files else ""
    tied_head = {"lm_head.weight"} if config.tie_word_embeddings else set()
    checkpoint.load_into(dict(model.targets(prefix)), ignored=tied_head)
    model.finish_loading(pack_weights=packable if pack_weights is None else pack_weights)
    return model.eval()


def _family(checkpoint: Checkpoint) -> tuple[str, bool]:
    """The family's name, and whether the checkpoint has a language-model head."""
    architecture = checkpoint.architecture
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"unsupported architecture {architecture!r} ({checkpoint.path}); "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    has_head = architecture.endswith(_WITH_HEAD)
    return architecture.removesuffix(_WITH_HEAD if has_head else _HEADLESS), has_head


def _require_full_attention(
    config: DecoderConfig, checkpoint: Checkpoint, max_model_len: int
) -> None:
    """A window that no sequence outgrows is full attention; a narrower one is not there yet."""
    window = config.sliding_window
    if window is not None and window < max_model_len:
        raise ValueError(
            f"{checkpoint.path} attends within a sliding window of {window} tokens, which is not "
            f"supported yet; set max_model_len to at most {window} (it is {max_model_len}), "
            f"which makes it full attention"
        )
