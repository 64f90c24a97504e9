"""Loading of models from checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import SCHEMES
from engine.interface.config import EngineConfig
from engine.layers import LayerOps, NativeLayerOps, ShardError, can_pack
from engine.models.base import CausalModel, GeneratorModel, ModelSettings
from engine.models.checked_loading import LoadTargets, config_errors, load_checked
from engine.models.decoders.decoder import SelfAttention
from engine.models.family import ModelFamily
from engine.models.registry import FAMILIES
from engine.native import NativeBuildError, load_kernels
from engine.text.tokenizer import encodes_as_the_library, load_tokenizer

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


open_checkpoint = partial(Checkpoint.open, parts_of=FAMILIES.parts_of)
"""Open a checkpoint of any known family; see :meth:`Checkpoint.open`."""


def open_configured(config: EngineConfig) -> Checkpoint:
    """Open the checkpoint that an engine's config names."""
    return open_checkpoint(
        config.model,
        part=config.part,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )


def is_supported(architecture: str) -> bool:
    """Return True if :func:`load_model` supports an architecture."""
    family = FAMILIES.find(architecture)
    return family is not None and family.build is not None


def find_family(checkpoint: Checkpoint) -> ModelFamily:
    """Return a checkpoint's family; ``ValueError`` unless its model is known to generate tokens."""
    family = FAMILIES.find(checkpoint.architecture)
    if family is None or family.build is None:
        raise ValueError(
            f"unsupported architecture {checkpoint.architecture!r} ({checkpoint.path}); "
            f"supported are {'; '.join((', '.join(FAMILIES.architectures()), *FAMILIES.failures))}"
        )
    return family


def load_tokenizer_of(
    checkpoint: Checkpoint, *, trust_remote_code: bool
) -> PreTrainedTokenizerBase | None:
    """Load a checkpoint's tokenizer, with its family's chat template if the folder has none."""
    path, config = checkpoint.path, checkpoint.whole_config
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code, config=config)
    if tokenizer is None or tokenizer.chat_template is not None:
        return tokenizer
    template = find_family(checkpoint).chat_template
    if template is not None:
        if not encodes_as_the_library(tokenizer):  # may not recognise special tokens in text
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        tokenizer.chat_template = template
    return tokenizer


def longest_sequence(checkpoint: Checkpoint) -> int:
    """Return the number of positions that the config of a token-generating model allows.

    Raises:
        ValueError: the architecture is not supported, or the config belongs to another model.
    """
    family = find_family(checkpoint)
    with config_errors(checkpoint):
        return family.max_positions(checkpoint.config)


def load_model(
    checkpoint: Checkpoint,
    settings: ModelSettings,
    check: Callable[[CausalModel], object] = lambda outline: None,
) -> CausalModel:
    """Build a checkpoint's model and load its weights; see :func:`load_checked` for ``check``.

    Raises:
        ValueError: the architecture, or something in its config, is not supported; or the weights
            do not match the config.
    """
    build = find_family(checkpoint).build
    assert build is not None
    settings = replace(settings, decoder_config_of=FAMILIES.decoder_config_of)
    # Without kernels that multiply codes, dequantized weights are faster.
    has_kernels = isinstance(settings.ops, NativeLayerOps) and settings.dtype == torch.float32
    holds_codes = checkpoint.stored is not None and has_kernels

    def build_on(device: torch.device) -> CausalModel:
        model: CausalModel = build(checkpoint, replace(settings, device=device))
        scheme, dtype = SCHEMES.get(settings.quantization or ""), settings.stored_dtype
        if scheme is not None or dtype is not None or holds_codes:
            model.hold_quantized(scheme, dtype)
        if settings.shards.size > 1:
            _require_divisible(checkpoint, model)
        return model

    if checkpoint.is_outline:
        with config_errors(checkpoint):
            model = build_on(torch.device("meta"))
        # Each once: towers may share weights. Not by name: without files, prefixes are not known.
        for name, place in dict.fromkeys(model.targets("model.")):
            if not isinstance(place, torch.Tensor):
                scheme, plain = checkpoint.scheme_of(name), torch.empty(place.shape, device="meta")
                place.copy_(plain if scheme is None else scheme.quantize(plain))  # type: ignore[arg-type]
    else:
        targets_of = partial(_targets, checkpoint)
        model = load_checked(checkpoint, settings.device, build_on, targets_of, check)
    model.finish_loading(pack_weights=can_pack(settings.device, settings.dtype))
    return model.eval()


def _require_divisible(checkpoint: Checkpoint, model: CausalModel) -> None:
    if checkpoint.stored is not None:
        raise ShardError(
            f"tensor_parallel divides plain weights; these are stored as {checkpoint.stored}"
        )
    divided = [m.attention for m in model.modules() if isinstance(m, SelfAttention)]
    reasons = {
        "recurrent layers": bool(model.state_layers),
        "an encoder": bool(model.encoder_hidden_size),
        "several codebooks": model.num_codebooks > 1,
        "attention of its own": not divided
        or any(x not in divided for x in model.attention_layers),
    }
    if found := [reason for reason, has_it in reasons.items() if has_it]:
        raise ShardError(
            "tensor_parallel divides decoders of attention and MLPs; "
            f"{checkpoint.architecture} has {', '.join(found)}"
        )


def _targets(checkpoint: Checkpoint, model: CausalModel) -> LoadTargets:
    stored = checkpoint.weight_files
    ignored = set(model.ignored_weights)
    if getattr(checkpoint.config, "tie_word_embeddings", False):
        ignored |= {name for name in stored if name.endswith(_HEAD)}
    # Some embedding models keep the headless names under a causal architecture.
    targets = dict(model.targets("model." if _EMBEDDING in stored else ""))
    return LoadTargets(targets, frozenset(ignored))


def load_generator(
    checkpoint: Checkpoint, device: torch.device, quantization: str | None = None
) -> GeneratorModel:
    """Load the model that generates audio from codec tokens.

    Args:
        quantization: how weights of linear layers are quantized; None: not at all.

    Raises:
        ValueError: the checkpoint is of another kind, lacks voices, or its weights do not match
            its config.
    """
    family = FAMILIES.find(checkpoint.architecture)
    if family is None or family.generator is None:
        known = (", ".join(FAMILIES.architectures(makes_sound=True)), *FAMILIES.failures)
        raise ValueError(
            f"{checkpoint.path} is a {checkpoint.architecture}; the generator that is supported is "
            f"{'; '.join(known)}"
        )
    model = family.generator(checkpoint, device).eval()
    if quantization is not None:
        # Lazily: text models need nothing of transformers' models.
        from engine.models.encoder_module import quantize_layers

        ops = LayerOps()
        if device.type == "cpu":
            with suppress(NativeBuildError):  # logged once by load_kernels
                ops = NativeLayerOps(load_kernels())
        settings = ModelSettings(torch.float32, device, 1, 1, ops)
        quantize_layers(model, SCHEMES[quantization], settings, is_loaded=True)
    return model
