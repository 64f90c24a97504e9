"""Qwen2.5-Omni's talker: Qwen2 over codec tokens, with inputs as wide as its thinker's rows.

::

    codec embedding + thinker's row  ──►  projection  ──►  layers  ──►  head
         (n, embedding_size)            (n, hidden_size)              (n, codec vocabulary)

A separate file, because the thinker's imports transformers' modelling code for its towers.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from engine.attention.layer import AttentionStep
from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import Target
from engine.layers import Linear, MultiAxisRotaryEmbedding, empty_parameter
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import DecoderModel, build_multi_axis_rotary
from engine.models.decoders.families import qwen2_config


class Qwen2_5OmniTalker(DecoderModel):
    """A decoder that projects its inputs; see the module docstring and :data:`Builder`.

    Source: "Qwen2.5-Omni Technical Report", 2025, section 2.3.

    Attributes:
        embedding_size: width of embeddings, and of the thinker's rows added to them.
    """

    head_name = "codec_head"
    num_position_axes = MultiAxisRotaryEmbedding.num_axes

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        config, options = checkpoint.config, settings.tensor_options
        rotary = build_multi_axis_rotary(config, settings)
        super().__init__(qwen2_config(config), [rotary], settings)
        self.embedding_size: int = config.embedding_size
        size = (config.vocab_size, config.embedding_size)
        self.embedding = empty_parameter(*size, **options)
        projection = {"thinker_to_talker_proj": config.hidden_size}
        self.projection = Linear(config.embedding_size, projection, bias=True, **options)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names and targets; see :meth:`CausalModel.targets`."""
        yield from super().targets(prefix)
        yield from self.projection.targets("")

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the layers over ``(num_tokens, embedding_size)``; see :meth:`CausalModel.forward`."""
        return super().forward(self.projection(inputs_embeds), positions, step)
