"""Mllama's encoder: transformers' vision tower and the projection to the decoder's width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.mllama.modeling_mllama import MllamaVisionModel

from engine.layers import Linear
from engine.models.encoder_module import EncoderModule, build_empty
from engine.models.model_settings import ModelSettings
from engine.requests.encoder_input import EncoderInput

__all__ = ["FEATURE_NAMES", "ImageEncoder"]

FEATURE_NAMES = _PIXELS, _RATIO, _TILES = "pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"
"""What the encoder takes, by the names of transformers' processor."""


class ImageEncoder(EncoderModule):
    """One image's tiles to rows, padding tiles included and last::

        | tile 0: class, patches | tile 1 | ... | padding tile | padding tile |
        └──────── what tokens see from the image on ──┘

    The vision tower lets tiles and padding tiles see each other, and tokens before the image see
    all of them: none can be left out.
    """

    def __init__(self, config: PreTrainedConfig, settings: ModelSettings) -> None:
        super().__init__()
        vision = config.vision_config
        self.module = build_empty(MllamaVisionModel, vision, settings)
        projector = {"multi_modal_projector": config.text_config.hidden_size}
        self.projector = Linear(
            vision.vision_output_dim, projector, bias=True, **settings.tensor_options
        )
        # The patches of a tile, and one row for its class.
        self.rows_per_tile: int = (vision.image_size // vision.patch_size) ** 2 + 1
        self.max_len = vision.max_num_tiles * self.rows_per_tile
        self.num_ratios = len(vision.supported_aspect_ratios)
        self.shapes = {
            _PIXELS: (1, vision.max_num_tiles, vision.num_channels, *[vision.image_size] * 2),
            _RATIO: (1,),
            _TILES: (1, vision.max_num_tiles),
        }

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """The tower's and the projection's weights."""
        yield from super().targets(f"{prefix}vision_model.")
        yield from self.projector.targets(prefix)

    def check_input(self, entry: EncoderInput) -> None:
        """The features of one image, as transformers' processor makes them."""
        if entry.token_ids or entry.features.keys() != self.shapes.keys():
            given = ", ".join(sorted(entry.features)) or "none"
            raise ValueError(
                f"Mllama's encoder takes the features {', '.join(self.shapes)} and no tokens; "
                f"got the features {given} and {len(entry.token_ids)} tokens"
            )
        for name, expected in self.shapes.items():
            shape = tuple(entry.features[name].shape)
            if shape != expected:
                raise ValueError(f"{name} of one image must be {expected}, got {shape}")
        tiles = entry.features[_TILES][0].tolist()
        if tiles != sorted(tiles, reverse=True) or not {1} <= set(tiles) <= {0, 1}:
            raise ValueError(f"{_TILES} must be ones and then zeros, got {tiles}")
        ratio = int(entry.features[_RATIO])
        if not 1 <= ratio <= self.num_ratios:
            raise ValueError(f"{_RATIO} must be 1 to {self.num_ratios}, got {ratio}")
        self.check_num_tokens(entry, self.max_len)

    def num_image_rows(self, entry: EncoderInput) -> int:
        """Rows of the tiles that are no padding."""
        return int(entry.features[_TILES].sum()) * self.rows_per_tile

    def forward(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """See :meth:`EncoderModule.forward`."""
        features = {name: self.stacked_feature(inputs, name) for name in self.shapes}
        rows: Tensor = self.projector(self.module(**features).last_hidden_state.flatten(0, 3))
        return rows
