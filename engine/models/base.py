"""What the engine asks of a model that runs over packed tokens."""

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


def _unknown(config: PreTrainedConfig) -> NoReturn:
    raise ValueError(f"no family of decoders is known here, not of type {config.model_type!r}")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model is to be held in memory, and for how long sequences.

    Attributes:
        dtype: of activations, and of all that has no other.
        block_size: tokens per block of the KV cache.
        max_model_len: longest sequence that will run, in tokens.
        ops: what computes norms, gates and rotations.
        decoder_config_of: from the config of a plain decoder inside another model to what reads it;
            ``ValueError`` for one that no family declares.
        pack_weights: whether to hold weights in the CPU library's own layout, which is faster for
            batches and the same up to rounding; None: where that is possible.
        quantization: how products' weights are quantized as they are loaded; None: not at all.
        stored_dtype: of products' weights that are not quantized, of decoders' embeddings and of
            the KV cache, where kernels convert it as they read; None: ``dtype``.
        shards: which share of a decoder's products this process holds.
    """

    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_model_len: int
    ops: LayerOps = field(default_factory=LayerOps)
    decoder_config_of: Callable[[PreTrainedConfig], Callable[[PreTrainedConfig], Any]] = _unknown
    pack_weights: bool | None = None
    quantization: Literal["int8", "int4"] | None = None
    stored_dtype: torch.dtype | None = None
    shards: Shards = WHOLE

    @property
    def page_dtype(self) -> torch.dtype:
        """Of keys and values in their pages."""
        return self.stored_dtype or self.dtype

    @property
    def tensor_options(self) -> TensorOptions:
        """As layers and ``torch.empty`` take them."""
        return {"dtype": self.dtype, "device": self.device}


@dataclass(frozen=True, slots=True, eq=False)
class CodeChunk:
    """Codes of one utterance that one pass turns into sound.

    Attributes:
        codes: ``(n,)`` int64, or ``(n, num_codebooks)`` where there are several codebooks.
        start: place of the first in its utterance.
        speaker: whose voice, by name; None of a model without voices.
        state: what the pass before handed on for this utterance; of the first, and of models that
            keep nothing, what :meth:`GeneratorModel.new_state` gives.
    """

    codes: Tensor
    start: int
    speaker: str | None
    state: Any


class GeneratorModel(nn.Module):
    """Turns codes into sound, either way:

    ::

        windowed    codes around a chunk are computed with it and thrown away; nothing is kept
        causal      sound depends on earlier codes alone; a state goes from chunk to chunk

    Attributes:
        samples_per_code: of sound, for each place (a row of codes, where codebooks are several).
        max_codes: places of the longest utterance.
        num_codes: codes are below this.
        num_codebooks: codes at one place.
        codes_per_block: places after which a windowed model's arithmetic starts again; windows
            are made of such blocks.
        speakers: names of the voices; none if there is nothing to choose.
        num_missing: samples that an utterance has less, at its beginning.
        has_flow: whether sound depends on a flow's steps, guidance and seed.
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
        """The voice of that name; None takes the model's first choice.

        Raises:
            ValueError: there is no such voice.
        """
        if name is not None:
            raise ValueError(f"unknown speaker {name!r}; this model has no voices to choose from")
        return None

    def new_state(self) -> Any:
        """What a causal model knows before an utterance begins; None of one that keeps nothing.

        States are never changed: a pass that failed is run again from the same one.
        """
        return None

    @abstractmethod
    def generate(
        self, chunks: Sequence[CodeChunk], params: GenerationParams
    ) -> tuple[Tensor | Sequence[Tensor], Sequence[Any]]:
        """Make sound of chunks of one length, each of another utterance.

        Returns:
            For each chunk ``(n * samples_per_code,)`` float32 on the CPU, in -1 to 1, less
            ``num_missing`` of an utterance's first chunk, and the state with which its utterance
            goes on.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(parameter.nbytes for parameter in self.parameters())


@runtime_checkable
class _Derived(Protocol):
    def finish_loading(self) -> None: ...


class CausalModel(nn.Module):
    """A decoder over packed tokens: all requests' tokens of a step lie in one dimension.

    Attributes:
        ops: what computes norms, gates and rotations, and packs weights.
        attention_layers: every attention layer in order; the engine groups and binds them.
        state_layers: every recurrent layer in order, likewise; none unless a model says so.
        hidden_size: width of ``hidden_states`` and of prompt embeddings.
        vocab_size: number of logits, or 0 when the checkpoint has no head (an embedding model).
        input_vocab_size: ids of prompts are below this; there may be more of them than logits.
        max_position_embeddings: the longest sequence that the checkpoint's config allows.
        num_position_axes: numbers that place one token: 1, or 3 (time, height, width), where
            ``forward`` takes positions of ``(3, num_tokens)``, or ``(num_tokens,)`` if all
            tokens of a step are text at the places that they have in their sequences.
        ignored_weights: names that a checkpoint may hold, although nothing asks for them.
        encoder_hidden_size: width of the rows that :meth:`encode` makes; 0 without an encoder.
        num_codebooks: ids that a step draws for one token: the first by the sampler, from the
            logits, the others by :meth:`draw_codes`.
        code_sampling: by what these are drawn, where tokens are not greedy.
        placeholders: of a model whose prompts may show images and the like, the ids of the tokens
            that stand for them; :meth:`encode_multimodal` makes their rows. Else empty.
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
        """Whether the host launches the same kernels in all steps of so many decodes.

        Recurrent layers upload an order of their own; experts may ask how many tokens they have,
        and models of several codebooks which tokens bring codes.
        """
        if self.state_layers or self.num_codebooks > 1:
            return False
        return not any(isinstance(module, SparseMoE) for module in self.modules())

    @abstractmethod
    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Checkpoint names, each with the tensor (or slice) that receives it.

        Args:
            prefix: of every name but the head's: ``"model."``, or nothing in headless
                checkpoints.
        """

    def hold_quantized(
        self, scheme: QuantizationScheme | None, dtype: torch.dtype | None = None
    ) -> None:
        """Have products take their weights quantized; call before loading.

        Routers of experts stay plain: a rounded choice is another choice.

        Args:
            scheme: for weights that come plain; None leaves those so.
            dtype: of those that are left so; None: the model's.
        """
        modules = list(self.modules())
        mixtures = [module for module in modules if isinstance(module, SparseMoE)]
        routers = [router for mixture in mixtures for router in mixture.routers]
        for module in modules:
            if isinstance(module, Linear) and module not in routers:
                module.hold_quantized(scheme, self.ops, dtype)

    def finish_loading(self, *, pack_weights: bool) -> None:
        """Derive what is derived from loaded weights; call once, after the last copy.

        Modules that derive something say so by a ``finish_loading`` of their own. Weights are
        packed one at a time. A packed tied head costs its size once more: the embedding stays for
        the look-up. Modules of transformers stay as they are.

        Args:
            pack_weights: whether to pack every product's weight for the CPU.
        """
        for module in self.modules():
            if isinstance(module, Linear) and (pack_weights or module.is_quantized):
                module.pack(self.ops)
            elif module is not self and isinstance(module, _Derived):
                module.finish_loading()

    def drop_all_but_layers(self) -> None:
        """Free what only the process runs that leads others: embeddings, head, towers."""

    @property
    def held(self) -> str:
        """How products hold weights that are stored quantized, in words."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        is_quantized = any(linear.is_quantized for linear in linears)
        return "multiplied as codes" if is_quantized else "dequantized on load"

    @property
    def weight_nbytes(self) -> int:
        """Bytes of all weights as they are held, packed ones included, shared ones once."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        counted = {id(p) for linear in linears for p in linear.parameters()}
        others = [p for p in self.parameters() if id(p) not in counted]
        return sum(linear.nbytes for linear in linears) + sum(p.nbytes for p in others)

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids ``(n,)`` to embeddings ``(n, hidden_size)``, scaled as the model wants."""

    @abstractmethod
    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the layers.

        Args:
            inputs_embeds: ``(num_tokens, hidden_size)``.
            positions: ``(num_tokens,)`` int64, each token's place in its own sequence.

        Returns:
            Named outputs; ``"hidden_states"`` ``(num_tokens, hidden_size)`` after the final norm
            is always there. Every tensor whose first dimension is ``num_tokens`` is mirrored in
            the stage-output cache under its name.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Rows of ``hidden_states`` ``(n, hidden_size)`` to logits ``(n, vocab_size)``, float32.

        Raises:
            ValueError: the checkpoint has no language-model head.
        """

    def draw_codes(self, hidden_states: Tensor, first: Tensor, draws: FurtherDraws) -> Tensor:
        """Draw the further codes of tokens that were just chosen.

        Continuous numbers are codes by their bits.

        Args:
            hidden_states: ``(n, hidden_size)``, the rows that the tokens were chosen from.
            first: ``(n,)`` the tokens.
            draws: by which they are drawn, row by row.

        Returns:
            ``(n, num_codebooks)`` int64: the tokens, each with its further codes. A token may come
            back as the one that ends a sequence, where all codes together say that it ends.
        """
        raise NotImplementedError(f"{type(self).__name__} has one codebook")

    def add_codes(self, embeds: Tensor, codes: Tensor) -> None:
        """Add, in place, what further codes bring to tokens' embeddings.

        Args:
            embeds: as :meth:`embed` made them.
            codes: see ``AttentionStep.codes``.
        """
        raise NotImplementedError(f"{type(self).__name__} has one codebook")

    def drawn_rows(self, codes: Tensor) -> dict[str, Tensor]:
        """Outputs that codes make by themselves: known as soon as a token is drawn.

        What :meth:`forward` emits under these names are the same rows.

        Args:
            codes: see ``AttentionStep.codes``.
        """
        return {"codes": codes}

    @property
    def max_encoder_len(self) -> int:
        """Most rows of one input that :meth:`encode` makes; 0 without an encoder."""
        return 0

    def encode(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """Run the encoder that the decoder attends to.

        Args:
            inputs: at least one, of any lengths.

        Returns:
            ``(sum of num_tokens, encoder_hidden_size)``, one input's rows after the other's.

        Raises:
            ValueError: an input cannot be encoded.
        """
        raise NotImplementedError(f"{type(self).__name__} has no encoder")

    def encode_multimodal(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """Make the rows that replace the :attr:`placeholders` of images and the like.

        Args:
            inputs: at least one item, of any requests.

        Returns:
            For each ``(num_rows, hidden_size)`` rows, on the model's device and in its type. Wider
            ones end in what ``AttentionStep.item_features`` brings back.

        Raises:
            ValueError: an input is nothing that this model takes, or has not as many
                placeholders as it has rows.
        """
        raise NotImplementedError(f"prompts of {type(self).__name__} show nothing")
