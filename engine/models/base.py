"""What the engine asks of a model that runs over packed tokens."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from engine.attention.layer import Attention, AttentionStep

__all__ = ["CausalModel"]


class CausalModel(nn.Module):
    """A decoder over packed tokens: all requests' tokens of a step lie in one dimension.

    Attributes:
        attention_layers: every attention layer in order; the engine groups and binds them.
        hidden_size: width of ``hidden_states`` and of prompt embeddings.
        vocab_size: number of logits, or 0 when the checkpoint has no head (an embedding model).
        max_position_embeddings: the longest sequence that the checkpoint's config allows.
    """

    attention_layers: list[Attention]
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int

    @property
    @abstractmethod
    def weight_nbytes(self) -> int:
        """Bytes of all weights as they are held, shared ones counted once."""

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
