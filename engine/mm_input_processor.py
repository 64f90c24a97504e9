"""Images of a prompt, through the checkpoint's processor, into the places that they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from transformers import BatchFeature

from engine.byte_sizes import format_bytes
from engine.checkpoint import Checkpoint
from engine.encoder_input_maker import features_hash
from engine.image_file import load_image_processor, open_image
from engine.mm_input import MultiModalInput
from engine.models.multimodal import MultiModalModel
from engine.prompt_positions import PromptPositions

__all__ = ["ExpandedPrompt", "MultiModalInputProcessor"]

_IMAGE: Literal["image"] = "image"
_GRID = "image_grid_thw"


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt in which every item has as many placeholders as rows.

    Attributes:
        token_ids: the whole prompt.
        items: in the order of their places.
        positions: where tokens lie on several axes; None where places are indices.
    """

    token_ids: list[int]
    items: tuple[MultiModalInput, ...]
    positions: PromptPositions | None


class MultiModalInputProcessor:
    """Expands placeholders, and makes what the model's tower takes.

    Args:
        model: knows its placeholder, and how many rows an image gives.
        processor: of the checkpoint: images to tensors.
        max_item_tokens: most rows of one item, for which the encoder cache has room.
        row_bytes: of one of them.
    """

    def __init__(
        self, model: MultiModalModel, processor: Any, *, max_item_tokens: int, row_bytes: int
    ) -> None:
        self._model = model
        self._processor = processor
        self._max_item_tokens = max_item_tokens
        self._row_bytes = row_bytes

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, model: MultiModalModel, *, cache_bytes: int, row_bytes: int
    ) -> MultiModalInputProcessor:
        """Load the image processor that a checkpoint brings.

        Raises:
            ValueError: it brings none, or Pillow is not installed.
        """
        return cls(
            model,
            load_image_processor(checkpoint.path),
            max_item_tokens=cache_bytes // row_bytes,
            row_bytes=row_bytes,
        )

    def process(
        self, token_ids: Sequence[int], images: Sequence[object], *, cache_salt: str | None = None
    ) -> ExpandedPrompt:
        """Put each image in the place of its placeholder.

        Args:
            token_ids: of the prompt, with one placeholder for each image.
            images: files, or images of Pillow.
            cache_salt: part of the items' hashes: items are shared only within one salt.

        Raises:
            ValueError: there are more images than placeholders or fewer, or an image cannot be
                read, processed, or held in the encoder cache.
        """
        placeholder = self._model.image_token_id
        num_places = sum(token_id == placeholder for token_id in token_ids)
        if num_places != len(images):
            raise ValueError(
                f"the prompt has {num_places} image placeholders (token {placeholder}), but "
                f"{len(images)} images were given; each image needs one placeholder"
            )
        features = (self._features(number, image) for number, image in enumerate(images))
        expanded: list[int] = []
        items: list[MultiModalInput] = []
        for token_id in token_ids:
            if token_id != placeholder:
                expanded.append(token_id)
                continue
            item = self._item(len(expanded), next(features), cache_salt)
            items.append(item)
            expanded += [placeholder] * item.length
        table = self._model.position_ids(expanded, items)
        return ExpandedPrompt(
            expanded, tuple(items), None if table is None else PromptPositions.of(table)
        )

    def _features(self, number: int, image: object) -> dict[str, Tensor]:
        try:
            opened = open_image(image)
        except ValueError as error:
            raise ValueError(f"image {number}: {error}") from error
        try:
            output = self._processor(images=opened, return_tensors="pt")
        # A strip of one pixel's width may shrink to none.
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"image {number} of {opened.width} x {opened.height} pixels cannot be processed: "
                f"{error}"
            ) from error
        return _unbatched(output, self._model.tower.feature_names)

    def _item(
        self, offset: int, features: Mapping[str, Tensor], cache_salt: str | None
    ) -> MultiModalInput:
        length = self._model.num_rows(features)
        if length > self._max_item_tokens:
            needed = format_bytes(length * self._row_bytes)
            raise ValueError(
                f"an image of {length} rows takes {needed} of the encoder cache, which has room "
                f"for {self._max_item_tokens} rows; raise encoder_cache_bytes"
            )
        digest = features_hash(features, length, cache_salt)
        return MultiModalInput(_IMAGE, offset, length, digest, features)


def _unbatched(output: BatchFeature, names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors of one image. Where a grid tells images apart, their patches come in one row."""
    packed = {"pixel_values"} if _GRID in names else set()
    return {name: output[name] if name in packed else output[name][0] for name in names}
