"""Qwen3-Omni's talker: experts over codes of several codebooks and its thinker's rows.

::

    codec embedding (of all codes of a token) + projection of the thinker's row ──► layers ──► head
                                                                                      │         │
    code predictor: [ the token's row ][ first code ][ second ] ... ──► the next  ◄───┴─────────┘

The first code is sampled like a token. In the same step, a small decoder draws the others one after
the other, starting from the row that the first was sampled from. It sees only this token, so it
keeps no state from step to step.

Rows of text and of multimodal items are projected by separate matrices. A row's last element, 0 or
1, selects the matrix.

Source: Xu et al., "Qwen3-Omni Technical Report", 2025; transformers' ``qwen3_omni_moe``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from engine.attention.layer import AttentionStep
from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.quantized_weight import Target
from engine.interface.sampling_params import SamplingParams
from engine.layers import MLP, Linear, MultiAxisRotaryEmbedding, empty_parameter
from engine.models.base import ModelSettings
from engine.models.decoders.code_predictor import CodePredictor
from engine.models.decoders.decoder import DecoderModel, build_multi_axis_rotary, build_rotary
from engine.models.decoders.families import qwen3_config, qwen3_moe_config
from engine.sampling.sampler import FurtherDraws


class _Predictor(CodePredictor):
    """Predictor of the codebooks after the first, each with a separate embedding and head."""

    def __init__(self, config: PreTrainedConfig, settings: ModelSettings) -> None:
        options, num_further = settings.tensor_options, config.num_code_groups - 1
        short = replace(settings, max_model_len=config.num_code_groups + 1)
        decoder = qwen3_config(config)
        super().__init__(decoder, build_rotary(config, short), num_further, short)
        shape = (num_further, decoder.vocab_size, decoder.hidden_size)
        self.embedding = empty_parameter(*shape, **options)
        heads = [
            Linear(decoder.hidden_size, {f"lm_head.{index}": decoder.vocab_size}, **options)
            for index in range(num_further)
        ]
        self.heads, self._heads = nn.ModuleList(heads), heads

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """See :meth:`CodePredictor.targets`."""
        yield from super().targets(prefix)
        for index, head in enumerate(self._heads):
            yield f"{prefix}model.codec_embedding.{index}.weight", self.embedding.data[index]
            yield from head.targets(prefix)

    def embed_code(self, codes: Tensor, codebook: int) -> Tensor:
        """See :meth:`CodePredictor.embed_code`."""
        return self.embedding[codebook - 1, codes]

    def logits(self, rows: Tensor, codebook: int) -> Tensor:
        """See :meth:`CodePredictor.logits`."""
        return self._heads[codebook - 1](rows)

    def embed(self, codes: Tensor) -> Tensor:
        """Sum the embeddings of further codes ``(n, num_further)`` to ``(n, hidden_size)``."""
        places = torch.arange(self.num_further, device=codes.device)
        return self.embedding[places, codes].sum(dim=1)


class Qwen3OmniTalker(DecoderModel):
    """A decoder over embeddings of codes and thinker rows; see the module docstring."""

    head_name = "codec_head"
    num_position_axes = MultiAxisRotaryEmbedding.num_axes
    code_sampling = SamplingParams(temperature=1.0, top_k=50, top_p=0.8)

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        config: Any = checkpoint.config
        text = config.text_config
        decoder = qwen3_moe_config(text, shared_size=text.shared_expert_intermediate_size)
        rotary = build_multi_axis_rotary(text, settings, interleaved=True)
        super().__init__(decoder, [rotary], settings)
        self.row_width: int = config.thinker_hidden_size + 1
        self.predictor = _Predictor(config.code_predictor_config, settings)
        self.num_codebooks: int = config.num_code_groups
        if self.num_codebooks != self.predictor.num_further + 1:
            raise ValueError(
                f"num_code_groups is {config.num_code_groups}, and the code predictor's "
                f"{self.predictor.num_further + 1}"
            )
        sizes = (config.thinker_hidden_size, text.intermediate_size, text.hidden_act)
        names, options = ("linear_fc1", "linear_fc2"), settings.tensor_options
        width, ops = text.hidden_size, settings.ops
        self.text_projection, self.hidden_projection = (
            MLP(*sizes, names=names, bias=True, output_size=width, ops=ops, **options)
            for _ in range(2)
        )

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names and targets; see :meth:`CausalModel.targets`."""
        for name, target in super().targets("model."):
            yield name.replace("embed_tokens", "codec_embedding"), target
        yield from self.text_projection.targets("text_projection.")
        yield from self.hidden_projection.targets("hidden_projection.")
        yield from self.predictor.targets("code_predictor.")

    def embed(self, input_ids: Tensor) -> Tensor:
        """Map codes ``(n,)`` to ``(n, hidden_size + row_width)``, with zeros in place of rows."""
        return F.pad(super().embed(input_ids), (0, self.row_width))

    def add_codes(self, embeds: Tensor, codes: Tensor) -> None:
        """See :meth:`CausalModel.add_codes`."""
        further = codes[:, 1:]
        if int(further.max()) < 0:
            return
        has_codes = further[:, :1] >= 0
        added = self.predictor.embed(further.clamp(min=0))
        embeds[:, : self.hidden_size] += added.masked_fill(~has_codes, 0)

    def draw_codes(self, hidden_states: Tensor, first: Tensor, draws: FurtherDraws) -> Tensor:
        """See :meth:`CausalModel.draw_codes`."""
        embeds = super().embed(first)
        further: Tensor = self.predictor(hidden_states, embeds, draws)
        return torch.cat((first[:, None], further), dim=1)

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the layers over embeddings from :meth:`embed` with rows."""
        embeds = inputs_embeds[:, : self.hidden_size]
        rows = inputs_embeds[:, self.hidden_size : -1].contiguous()
        is_item = inputs_embeds[:, -1:] > 0
        projected = self.text_projection(rows)
        if bool(is_item.any()):
            projected = torch.where(is_item, self.hidden_projection(rows), projected)
        return super().forward(embeds + projected, positions, step)
