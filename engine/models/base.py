"""What the engine asks of a model that runs over packed tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from engine.attention.layer import Attention
from engine.attention.state_layer import StateLayer
from engine.attention.step import AttentionStep
from engine.layers import LayerOps, Linear
from engine.requests.encoder_input import EncoderInput
from engine.requests.multimodal_input import Modality, MultiModalInput

__all__ = ["CausalModel"]


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

    @abstractmethod
    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names, each with the tensor (or slice) that receives it.

        Args:
            prefix: of every name but the head's: ``"model."``, or nothing in headless
                checkpoints.
        """

    def finish_loading(self, *, pack_weights: bool) -> None:
        """Derive what is derived from loaded weights; call once, after the last copy.

        Modules that derive something say so by a ``finish_loading`` of their own. Weights are
        packed one at a time. A packed tied head costs its size once more: the embedding stays for
        the look-up. Modules of transformers stay as they are.

        Args:
            pack_weights: whether to pack every product's weight for the CPU.
        """
        for module in self.modules():
            if isinstance(module, Linear) and pack_weights:
                module.pack(self.ops)
            elif module is not self and isinstance(module, _Derived):
                module.finish_loading()

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
            step: attention metadata of this step.

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
            For each ``(num_rows, hidden_size)`` rows, on the model's device and in its type.

        Raises:
            ValueError: an input is nothing that this model takes, or has not as many
                placeholders as it has rows.
        """
        raise NotImplementedError(f"prompts of {type(self).__name__} show nothing")
