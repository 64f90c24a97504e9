"""Encoders from transformers, used next to our decoders: padded batches in, packed rows out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import SCHEMES, QuantizationScheme, Target
from engine.layers import Linear
from engine.models.base import CausalModel, ModelSettings
from engine.models.checked_loading import LoadTargets, load_checked
from engine.requests.encoder_input import EncoderInput, EncoderView

OptionalScheme: TypeAlias = QuantizationScheme | None
ModelT = TypeVar("ModelT", bound=PreTrainedModel)


class EncoderModule(nn.Module):
    """One encoder from transformers.

    Attributes:
        max_len: maximum number of rows per input.
    """

    module: PreTrainedModel
    max_len: int

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the target of its tensor."""
        return module_targets(self.module, prefix)

    def check_input(self, entry: EncoderInput) -> None:
        """Raise a descriptive ``ValueError`` if features that a processor made do not fit."""

    @abstractmethod
    def forward(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """Encode checked inputs to ``(sum of num_tokens, width)``, in order."""

    def stacked_feature(self, inputs: Sequence[EncoderInput], name: str) -> Tensor:
        """Stack a feature of all inputs, batch dimension first, on the encoder's device."""
        return torch.stack([entry.features[name] for entry in inputs]).to(self.module.device)


class TextEncoder(EncoderModule):
    """Bidirectional encoder of token ids to hidden states, which shares the decoder's embedding.

    Args:
        make: creates the encoder from ``config``.
        embedding: ``(vocab_size, width)``.
    """

    def __init__(
        self,
        make: Callable[[Any], PreTrainedModel],
        config: PreTrainedConfig,
        settings: ModelSettings,
        max_len: int,
        embedding: nn.Parameter,
    ) -> None:
        super().__init__()
        self.module = build_empty(make, config, settings)
        self.module.get_input_embeddings().register_parameter("weight", embedding)
        self.max_len = max_len

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield all targets except the shared embedding."""
        shared = f"{prefix}embed_tokens.weight"
        return (target for target in super().targets(prefix) if target[0] != shared)

    def forward(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """See :meth:`EncoderModule.forward`."""
        device = self.module.device
        ids = pad_sequence([torch.tensor(entry.token_ids) for entry in inputs], batch_first=True)
        lengths = torch.tensor([entry.num_tokens for entry in inputs])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).to(device)
        output = self.module(input_ids=ids.to(device), attention_mask=mask.long())
        return output.last_hidden_state[mask]


class QuantizedLinear(Linear):
    """A linear layer, named ``name``, that replaces a plain one of transformers' module."""

    def __init__(
        self, name: str, plain: nn.Linear, settings: ModelSettings, scheme: OptionalScheme
    ) -> None:
        shape = plain.in_features, {name: plain.out_features}
        super().__init__(*shape, bias=plain.bias is not None, **settings.tensor_options)
        self.hold_quantized(scheme, settings.ops, settings.stored_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        return super().forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def module_targets(module: nn.Module, prefix: str) -> Iterator[tuple[str, Target]]:
    """Yield a placed module's names under ``prefix``, each with the target of its tensor."""
    for name, tensor in module.state_dict().items():
        yield f"{prefix}{name}", tensor
    for layer in module.modules():
        if isinstance(layer, QuantizedLinear):
            yield from layer.targets(prefix)


def quantize_layers(
    module: nn.Module, scheme: OptionalScheme, settings: ModelSettings, *, is_loaded: bool
) -> None:
    """Replace the linear layers of a module; those of a loaded one keep their weights."""
    for name, layer in list(module.named_modules()):
        if type(layer) is nn.Linear:  # subclasses are read in ways of their own
            quantized = QuantizedLinear(name, layer, settings, scheme)
            if is_loaded:
                places = [place for _, place in quantized.targets("")]
                for place, loaded in zip(places, layer.parameters(), strict=True):
                    place.copy_(loaded.detach())
            module.set_submodule(name, quantized)


_TILE_ATTENTION = "omni_bfloat16_tiles"


def _attend_in_tiles(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' ``sdpa`` attention in bfloat16, for which torch uses AMX tiles."""
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.bfloat16()
    half = query.bfloat16(), key.bfloat16(), value.bfloat16()
    output, _ = sdpa_attention_forward(module, *half, attention_mask, **options)
    return output.to(query.dtype), None


AttentionInterface.register(_TILE_ATTENTION, _attend_in_tiles)
AttentionMaskInterface.register(_TILE_ATTENTION, sdpa_mask)


def build_empty(
    make: Callable[[Any], ModelT], config: PreTrainedConfig, settings: ModelSettings
) -> ModelT:
    """Create a module of transformers whose weights are neither initialised nor loaded.

    Buffers that it derives from its config are computed, in the module's own types.
    """
    return place(make_unplaced(make, config), settings)


def make_unplaced(make: Callable[[Any], ModelT], config: PreTrainedConfig) -> ModelT:
    """Create a module of transformers on the meta device, for :func:`place`."""
    with torch.device("meta"):
        return make(deepcopy(config))


def place(module: ModelT, settings: ModelSettings) -> ModelT:
    """Allocate a meta module on the settings' device, which may be ``meta`` again.

    Its linear layers are held as ``encoder_quantization`` or else ``stored_dtype`` says. With the
    latter, attention is computed in bfloat16 as well where the processor has tiles for it.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(settings.dtype)
    if settings.device.type != "meta":
        module.to_empty(device=settings.device)
        for stored in module.state_dict(keep_vars=True).values():
            # transformers' own flag: the next line skips tensors that have it.
            stored._is_hf_initialized = True
        module.initialize_weights()
    scheme = SCHEMES.get(settings.encoder_quantization or "")
    if scheme is not None or settings.stored_dtype is not None:
        # After initialize_weights, which writes to some layers by name. Until something is written
        # to them, the replaced weights take no memory on a CPU.
        quantize_layers(module, scheme, settings, is_loaded=False)
    in_tiles = settings.stored_dtype == torch.bfloat16 and settings.ops.has_tiles
    if in_tiles and module.config._attn_implementation == "sdpa":
        module.set_attn_implementation(_TILE_ATTENTION)
    module.requires_grad_(False).eval()
    return module


def load_network(
    checkpoint: Checkpoint,
    device: torch.device,
    make: Callable[[Any], ModelT],
    targets: Callable[[ModelT], Mapping[str, Tensor]] = nn.Module.state_dict,
    ignored: Collection[str] = (),
) -> ModelT:
    """Load a module of transformers in float32.

    Args:
        make: creates the module from the checkpoint's config.
        targets: maps checkpoint names to the tensors to load them into.
        ignored: names that may be stored but are not used.

    Raises:
        ValueError: the weights do not match the config.
    """

    def build(where: torch.device) -> ModelT:
        return build_empty(make, checkpoint.config, ModelSettings(torch.float32, where, 1, 1))

    names = frozenset(ignored)
    return load_checked(checkpoint, device, build, lambda made: LoadTargets(targets(made), names))


class EncoderDecoderModel(CausalModel):
    """A decoder over packed tokens that attends to its encoder's output."""

    encoder: EncoderModule

    @property
    def max_encoder_len(self) -> int:
        """Maximum number of encoder rows per input."""
        return self.encoder.max_len

    def encoder_view(self, entry: EncoderInput | None, decoder_ids: Sequence[int]) -> EncoderView:
        """Check a request, and return the range of encoder rows that its decoder sees."""
        if entry is None:
            raise ValueError("an encoder-decoder model needs an input for its encoder")
        self.encoder.check_input(entry)
        return EncoderView(0, entry.num_tokens, entry.num_tokens)

    def encode(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """Run the encoder over inputs of checked requests; see :meth:`CausalModel.encode`."""
        return self.encoder(inputs)
