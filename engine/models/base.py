"""The interface between the engine and a model that runs over packed tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from engine.attention.layer import Attention, AttentionStep, StateLayer
from engine.checkpoints.quantized_weight import QuantizationScheme, Target
from engine.interface.config import GenerationParams
from engine.interface.sampling_params import SamplingParams
from engine.layers import WHOLE, LayerOps, Linear, Shards, SparseMoE, TensorOptions
from engine.requests.encoder_input import EncoderInput, Modality, MultiModalInput
from engine.sampling.sampler import FurtherDraws


def _no_decoder(config: PreTrainedConfig) -> NoReturn:
    raise ValueError(f"no family of decoders is known here, not of type {config.model_type!r}")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Memory format of a model, and its maximum sequence length.

    Attributes:
        dtype: of activations, and of everything without a type of its own.
        block_size: tokens per block of the KV cache.
        max_model_len: longest sequence that will run, in tokens.
        ops: computes norms, gates and rotations.
        decoder_config_of: maps the config of a plain decoder inside another model to the function
            that reads it; raises ``ValueError`` if no family declares such a decoder.
        quantization: how weights of linear layers are quantized on load; None: not quantized.
        encoder_quantization: likewise for the linear layers of encoders and towers.
        stored_dtype: type of unquantized weights of linear layers (of encoders and towers, too), of
            decoders' embeddings and of the KV cache, converted as they are read; None: ``dtype``.
        shards: the share of a decoder's linear layers that this process holds.
    """

    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_model_len: int
    ops: LayerOps = field(default_factory=LayerOps)
    decoder_config_of: Callable[[PreTrainedConfig], Callable[[PreTrainedConfig], Any]] = _no_decoder
    quantization: Literal["int8", "int4"] | None = None
    encoder_quantization: Literal["int8", "int4"] | None = None
    stored_dtype: torch.dtype | None = None
    shards: Shards = WHOLE

    @property
    def page_dtype(self) -> torch.dtype:
        """Type of keys and values in KV cache pages."""
        return self.stored_dtype or self.dtype

    @property
    def tensor_options(self) -> TensorOptions:
        """Type and device as keyword arguments of layers and ``torch.empty``."""
        return {"dtype": self.dtype, "device": self.device}


@dataclass(frozen=True, slots=True, eq=False)
class CodeChunk:
    """Codes of one utterance that one pass turns into audio.

    Attributes:
        codes: ``(n,)`` int64, or ``(n, num_codebooks)`` with several codebooks.
        start: position of the first code in its utterance.
        speaker: name of the voice; None for a model without voices.
        state: what the previous pass returned for this utterance. For the first pass, and for
            stateless models, the result of :meth:`GeneratorModel.new_state`.
    """

    codes: Tensor
    start: int
    speaker: str | None
    state: Any


def weight_nbytes(model: nn.Module) -> int:
    """Return the bytes of all weights in memory, including packed ones; shared ones count once."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    counted = {id(p) for linear in linears for p in linear.parameters()}
    others = [p for p in model.parameters() if id(p) not in counted]
    return sum(linear.nbytes for linear in linears) + sum(p.nbytes for p in others)


class GeneratorModel(nn.Module):
    """Turns codes into audio in one of two ways:

    ::

        windowed    codes around a chunk are computed with it and discarded; nothing is kept
        causal      audio depends only on earlier codes; a state is passed from chunk to chunk

    Attributes:
        samples_per_code: audio samples per position (a row of codes, with several codebooks).
        max_codes: maximum number of positions in an utterance.
        num_codes: number of codes in a codebook; codes are below this.
        num_codebooks: codes per position.
        codes_per_block: number of positions after which a windowed model's computation repeats;
            windows consist of such blocks.
        speakers: names of the voices; empty if there is no choice.
        num_missing: samples missing at the beginning of an utterance.
        has_flow: True if audio depends on a flow's steps, guidance and seed.
    """

    device: torch.device
    sampling_rate: int
    samples_per_code: int
    max_codes: int
    num_codes: int
    num_codebooks: int = 1
    codes_per_block: int = 1
    speakers: tuple[str, ...] = ()
    num_missing: int = 0
    has_flow: bool = True

    def choose_speaker(self, name: str | None) -> str | None:
        """Return the name of a voice; None selects the model's default.

        Raises:
            ValueError: there is no such voice.
        """
        if name is not None:
            raise ValueError(f"unknown speaker {name!r}; this model has no voices to choose from")
        return None

    def new_state(self) -> Any:
        """Return the initial state of an utterance; None for a stateless model.

        States are immutable: a failed pass is retried from the same one.
        """
        return None

    @abstractmethod
    def generate(
        self, chunks: Sequence[CodeChunk], params: GenerationParams
    ) -> tuple[Tensor | Sequence[Tensor], Sequence[Any]]:
        """Generate audio from chunks of equal length, each of a different utterance.

        Returns:
            For each chunk ``(n * samples_per_code,)`` float32 on the CPU, in -1 to 1, without the
            first ``num_missing`` samples in an utterance's first chunk; and the state from which
            its utterance continues.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, including packed ones."""
        return weight_nbytes(self)


@runtime_checkable
class _HasDerivedValues(Protocol):
    def finish_loading(self) -> None: ...


class CausalModel(nn.Module):
    """A decoder over packed tokens: the tokens of all requests in a step share one dimension.

    Attributes:
        ops: computes norms, gates and rotations, and packs weights.
        attention_layers: every attention layer in order; the engine groups and binds them.
        state_layers: every recurrent layer in order, likewise; empty by default.
        hidden_size: width of ``hidden_states`` and of prompt embeddings.
        vocab_size: number of logits, or 0 if the checkpoint has no head (an embedding model).
        input_vocab_size: prompt ids are below this; may exceed the number of logits.
        max_position_embeddings: the longest sequence that the checkpoint's config allows.
        num_position_axes: position values per token: 1, or 3 (time, height, width). With 3,
            ``forward`` accepts positions ``(3, num_tokens)``, or ``(num_tokens,)`` if all tokens
            of a step are text at their sequence positions.
        ignored_weights: names that a checkpoint may contain but the model does not use.
        encoder_hidden_size: width of the rows returned by :meth:`encode`; 0 without an encoder.
        num_codebooks: ids drawn per token: the first by the sampler from the logits, the others
            by :meth:`draw_codes`.
        code_sampling: sampling parameters of the other ids, if tokens are not greedy.
        placeholders: ids of the tokens that stand for images and other items in prompts, by
            modality; :meth:`encode_multimodal` computes their rows. Empty for text-only models.
    """

    ops: LayerOps
    attention_layers: list[Attention]
    state_layers: Sequence[StateLayer] = ()
    hidden_size: int
    vocab_size: int
    input_vocab_size: int
    max_position_embeddings: int
    num_position_axes: int = 1
    ignored_weights: Collection[str] = ()
    encoder_hidden_size: int = 0
    placeholders: Mapping[Modality, int] = MappingProxyType({})
    num_codebooks: int = 1
    code_sampling: SamplingParams = SamplingParams()

    @property
    def has_static_decodes(self) -> bool:
        """True if the host launches the same kernels in all steps with equally many decodes.

        Recurrent layers upload a separate order; experts may read their token counts, and models
        with several codebooks which tokens have codes.
        """
        if self.state_layers or self.num_codebooks > 1:
            return False
        return not any(isinstance(module, SparseMoE) for module in self.modules())

    @abstractmethod
    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names, each with the tensor (or slice) to load it into.

        Args:
            prefix: of every name except the head's: ``"model."``, or empty in headless
                checkpoints.
        """

    def hold_quantized(
        self, scheme: QuantizationScheme | None, dtype: torch.dtype | None = None
    ) -> None:
        """Make linear layers hold their weights in quantized form; call before loading.

        Routers of experts stay plain: rounding could change the selected experts.

        Args:
            scheme: for weights that are stored plain; None leaves them plain.
            dtype: type of the weights left plain; None: the model's.
        """
        modules = list(self.modules())
        mixtures = [module for module in modules if isinstance(module, SparseMoE)]
        routers = [router for mixture in mixtures for router in mixture.routers]
        for module in modules:
            if isinstance(module, Linear) and not module.is_quantized and module not in routers:
                module.hold_quantized(scheme, self.ops, dtype)

    def finish_loading(self, *, pack_weights: bool) -> None:
        """Compute everything derived from loaded weights; call once, after the last copy.

        Modules with derived values have a ``finish_loading`` method. Weights are packed one at a
        time. A packed tied head takes its size in addition: the embedding stays for the look-up.
        Modules of transformers stay unchanged.

        Args:
            pack_weights: if true, pack the weight of every linear layer for the CPU.
        """
        for module in self.modules():
            if isinstance(module, Linear) and (pack_weights or module.is_quantized):
                module.pack(self.ops)
            elif module is not self and isinstance(module, _HasDerivedValues):
                module.finish_loading()

    def drop_all_but_layers(self) -> None:
        """Free what only the leading process runs: embeddings, head, towers."""

    @property
    def held(self) -> str:
        """Description of how linear layers hold weights that are stored quantized."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        is_quantized = any(linear.is_quantized for linear in linears)
        return "multiplied as codes" if is_quantized else "dequantized on load"

    @property
    def weight_nbytes(self) -> int:
        """See :func:`weight_nbytes`."""
        return weight_nbytes(self)

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """Map token ids ``(n,)`` to embeddings ``(n, hidden_size)``, with the model's scale."""

    @abstractmethod
    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the layers.

        Args:
            inputs_embeds: ``(num_tokens, hidden_size)``.
            positions: ``(num_tokens,)`` int64, each token's position in its sequence.

        Returns:
            Named outputs, which always include ``"hidden_states"`` ``(num_tokens, hidden_size)``
            after the final norm. Every tensor whose first dimension is ``num_tokens`` is mirrored
            in the stage-output cache under its name.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Map rows of ``hidden_states`` ``(n, hidden_size)`` to float32 logits ``(n, vocab_size)``.

        Raises:
            ValueError: the checkpoint has no language-model head.
        """

    def draw_codes(self, hidden_states: Tensor, first: Tensor, draws: FurtherDraws) -> Tensor:
        """Draw the further codes of tokens that were just sampled.

        Continuous values are represented as codes by their bits.

        Args:
            hidden_states: ``(n, hidden_size)``, the rows that the tokens were sampled from.
            first: ``(n,)`` the tokens.
            draws: sampler of the further codes, row by row.

        Returns:
            ``(n, num_codebooks)`` int64: the tokens, each with its further codes. A token may be
            replaced by the end-of-sequence token if its codes together mark the end.
        """
        raise NotImplementedError(f"{type(self).__name__} has one codebook")

    def add_codes(self, embeds: Tensor, codes: Tensor) -> None:
        """Add the embeddings of further codes to tokens' embeddings in place.

        Args:
            embeds: as returned by :meth:`embed`.
            codes: see ``AttentionStep.codes``.
        """
        raise NotImplementedError(f"{type(self).__name__} has one codebook")

    def drawn_rows(self, codes: Tensor) -> dict[str, Tensor]:
        """Compute outputs that depend only on codes: known as soon as a token is drawn.

        :meth:`forward` emits the same rows under these names.

        Args:
            codes: see ``AttentionStep.codes``.
        """
        return {"codes": codes}

    @property
    def max_encoder_len(self) -> int:
        """Maximum number of rows that :meth:`encode` returns per input; 0 without an encoder."""
        return 0

    def encode(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """Run the encoder that the decoder attends to.

        Args:
            inputs: at least one, of any lengths.

        Returns:
            ``(sum of num_tokens, encoder_hidden_size)``, the rows of all inputs in order.

        Raises:
            ValueError: an input cannot be encoded.
        """
        raise NotImplementedError(f"{type(self).__name__} has no encoder")

    def encode_multimodal(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """Compute the rows that replace the :attr:`placeholders` of images and other items.

        Args:
            inputs: at least one item, of any requests.

        Returns:
            For each ``(num_rows, hidden_size)`` rows, on the model's device and in its type. Wider
            rows end in the features that are passed back in ``AttentionStep.item_features``.

        Raises:
            ValueError: an input is not supported by this model, or its numbers of placeholders
                and rows differ.
        """
        raise NotImplementedError(f"prompts of {type(self).__name__} show nothing")
