"""Base of decoders whose prompts contain images, audio or videos among their tokens.

The towers and the decoder share only the embeddings::

    prompt     | a | b | * | * | * | c |        * = placeholder
    embed      | A | B | . | . | . | C |
    tower              | r0| r1| r2|            one row per placeholder, in order
    decoder    | A | B | r0| r1| r2| C |
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.layer import AttentionStep
from engine.checkpoints.quantized_weight import QuantizationScheme, Target
from engine.inputs.multimodal_inputs import FeatureTaker, ItemSide
from engine.models.base import CausalModel
from engine.models.encoder_module import module_targets
from engine.requests.encoder_input import Modality, MultiModalInput

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"


class ItemTower(nn.Module, FeatureTaker):
    """A tower of transformers, and the mapping from its output to rows for the decoder.

    Attributes:
        known_weight: suffix of one weight's name, from which the prefix of the others is derived.
    """

    module: PreTrainedModel
    known_weight: str

    def targets(self, stored: Collection[str]) -> Iterator[tuple[str, Target]]:
        """Yield names as in the checkpoint's ``stored`` ones, each with the tensor to load into."""
        return module_targets(self.module, unique_prefix(stored, self.known_weight))

    @abstractmethod
    def forward(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """Encode checked items, whole or in pieces, to rows for each.

        See :meth:`CausalModel.encode_multimodal`.
        """

    def require_features(self, features: Mapping[str, Tensor]) -> None:
        """Raise ``ValueError`` unless these are the tensors of :attr:`feature_names`."""
        if features.keys() != set(self.feature_names):
            raise ValueError(
                f"{type(self).__name__} takes the features {', '.join(self.feature_names)}; "
                f"got {', '.join(sorted(features)) or 'none'}"
            )


class MultiModalModel(CausalModel, ItemSide):
    """A decoder over packed tokens, with towers that encode the items in its prompts.

    Args:
        decoder: computes everything except the items' rows.
        towers: compute the rows, by modality. Towers may share weights.
        placeholders: ids of the tokens that stand for the rows in the prompt.
        stored: names of the checkpoint's weights: published folders name them in several ways.

    Raises:
        ValueError: two modalities have the same placeholder.
    """

    towers: dict[Modality, ItemTower]

    def __init__(
        self,
        decoder: CausalModel,
        towers: Mapping[Modality, ItemTower],
        placeholders: Mapping[Modality, int],
        stored: Collection[str],
    ) -> None:
        super().__init__()
        if len(set(placeholders.values())) < len(placeholders):
            ids = ", ".join(f"{name} {token_id}" for name, token_id in placeholders.items())
            raise ValueError(f"each modality must have a placeholder of its own, got {ids}")
        self.decoder = decoder
        self.towers = dict(towers)
        self.tower_modules = nn.ModuleList(towers.values())
        self.placeholders = dict(placeholders)
        self.attention_layers = decoder.attention_layers
        self.state_layers = decoder.state_layers
        self.hidden_size = decoder.hidden_size
        self.vocab_size = decoder.vocab_size
        self.input_vocab_size = decoder.input_vocab_size
        self.max_position_embeddings = decoder.max_position_embeddings
        self._stored = stored

    def targets(self, prefix: str = "") -> Iterator[tuple[str, Target]]:
        """See :meth:`CausalModel.targets`; all prefixes are derived from the stored names.

        Published folders keep the decoder under ``language_model.model.`` with its head next to it,
        or under ``model.``; newer exports under ``model.language_model.``, the head outside.
        """
        for tower in self.towers.values():
            yield from tower.targets(self._stored)
        head = next((name for name in self._stored if name.endswith(_HEAD)), _HEAD)
        for name, tensor in self.decoder.targets(unique_prefix(self._stored, _EMBEDDING)):
            yield (head if name == _HEAD else name), tensor

    def hold_quantized(
        self, scheme: QuantizationScheme | None, dtype: torch.dtype | None = None
    ) -> None:
        """See :meth:`CausalModel.hold_quantized`; the towers stay unchanged."""
        self.decoder.hold_quantized(scheme, dtype)

    def finish_loading(self, *, pack_weights: bool) -> None:
        """See :meth:`CausalModel.finish_loading`; the towers stay unchanged."""
        self.decoder.finish_loading(pack_weights=pack_weights)

    def drop_all_but_layers(self) -> None:
        """See :meth:`CausalModel.drop_all_but_layers`."""
        self.towers, self.tower_modules = {}, nn.ModuleList()
        self.decoder.drop_all_but_layers()

    def num_rows(self, modality: Modality, features: Mapping[str, Tensor]) -> int:
        """Return the number of placeholders that an item needs; see :meth:`ItemTower.num_rows`."""
        return self.towers[modality].num_rows(features)

    def encode_multimodal(self, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
        """Run each tower at most once; see :meth:`CausalModel.encode_multimodal`."""
        for item in inputs:
            num_rows = self.num_rows(item.modality, item.features)
            if num_rows != item.num_rows:
                raise ValueError(
                    f"the {item.modality} at position {item.offset} has {item.num_rows} "
                    f"placeholders; its features give {num_rows} rows"
                )
        rows: dict[int, Tensor] = {}
        for modality, tower in self.towers.items():
            mine = [index for index, item in enumerate(inputs) if item.modality == modality]
            if mine:
                rows |= zip(mine, tower([inputs[index] for index in mine]), strict=True)
        return [rows[index] for index in range(len(inputs))]

    def embed(self, input_ids: Tensor) -> Tensor:
        """Map token ids ``(n,)``, including placeholders, to ``(n, hidden_size)``."""
        return self.decoder.embed(input_ids)

    def forward(
        self, inputs_embeds: Tensor, positions: Tensor, step: AttentionStep
    ) -> dict[str, Tensor]:
        """Run the decoder; see :meth:`CausalModel.forward` and :attr:`num_position_axes`."""
        return self.decoder(inputs_embeds, positions, step)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states to float32 logits; see :meth:`CausalModel.compute_logits`."""
        return self.decoder.compute_logits(hidden_states)


def unique_prefix(stored: Collection[str], suffix: str) -> str:
    """Return the prefix of the one stored name that ends with ``suffix``; empty if none is stored.

    Raises ``ValueError`` if names are stored, but not exactly one ends with ``suffix``.
    """
    prefixes = [name.removesuffix(suffix) for name in stored if name.endswith(suffix)]
    if stored and len(prefixes) != 1:
        raise ValueError(
            f"of the checkpoint's weights one should be named *{suffix}, found {len(prefixes)}"
        )
    return "".join(prefixes)
