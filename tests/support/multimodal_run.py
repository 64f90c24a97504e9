"""Prompts with images, run over packed batches, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from engine.models.multimodal import MultiModalModel
from engine.requests.encoder_input import MultiModalInput
from tests.support.greedy_reference import GreedyAnswer
from tests.support.packed_model import PackedRun

__all__ = ["ImagePrompt", "MultiModalReference", "MultiModalRun", "join"]

Features = dict[str, Tensor]


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with its placeholders expanded, and the images that they stand for."""

    token_ids: list[int]
    images: tuple[MultiModalInput, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


def join(pieces: Sequence[list[int] | Features], model: MultiModalModel) -> ImagePrompt:
    """Texts and images in a row, each image with as many placeholders as it has rows."""
    ids: list[int] = []
    images = []
    for piece in pieces:
        if isinstance(piece, list):
            ids += piece
            continue
        length = model.num_rows("image", piece)
        images.append(MultiModalInput("image", len(ids), length, b"", piece))
        ids += [model.placeholders["image"]] * length
    return ImagePrompt(ids, tuple(images))


class MultiModalRun(PackedRun):
    """A :class:`PackedRun` whose requests' prompts have images.

    Args:
        model: a float32 model on the CPU.
        prompts: one per request.
        max_lens: per request, the longest that its sequence will be.
        backend: which attention backend.
    """

    model: MultiModalModel

    @torch.inference_mode()
    def __init__(
        self,
        model: MultiModalModel,
        prompts: Sequence[ImagePrompt],
        max_lens: Sequence[int],
        *,
        backend: str = "torch",
    ) -> None:
        super().__init__(model, max_lens, backend=backend)
        images = [image for prompt in prompts for image in prompt.images]
        encoded = iter(model.encode_multimodal(images)) if images else iter(())
        self._embeds = []
        self._places = []
        for prompt in prompts:
            embeds = model.embed(torch.tensor(prompt.token_ids))
            for image in prompt.images:
                embeds[image.offset : image.end] = next(encoded)
            self._embeds.append(embeds)
            table = model.position_ids(prompt.token_ids, prompt.images)
            indices = torch.arange(len(prompt)).expand(model.num_position_axes, -1)
            self._places.append(indices if table is None else table)

    def embed(self, request: int, chunk: Tensor) -> Tensor:
        """Rows of images where the prompt has them."""
        done = self.done[request]
        prompt = self._embeds[request][done : done + len(chunk)]
        return torch.cat([prompt, self.model.embed(chunk[len(prompt) :])])

    def positions(self, request: int, count: int) -> Tensor:
        """``(axes, n)``, or ``(n,)`` where there is one axis."""
        table, done = self._places[request], self.done[request]
        follow = torch.arange(done + count) + int(table.max()) + 1
        places = torch.cat([table, follow.expand(len(table), -1)], dim=1)[:, done : done + count]
        return places if self.model.num_position_axes > 1 else places[0]


class MultiModalReference:
    """A checkpoint in transformers, one prompt at a time."""

    def __init__(self, folder: str) -> None:
        config = AutoConfig.from_pretrained(folder)
        model_class: Any = getattr(transformers, config.architectures[0])
        self.model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        self.is_qwen = config.model_type == "qwen2_5_vl"

    @torch.inference_mode()
    def hidden_states(self, prompt: ImagePrompt, generated: Sequence[int] = ()) -> Tensor:
        """``(n, hidden)`` after the final norm, in one pass."""
        ids = torch.tensor([[*prompt.token_ids, *generated]])
        # What earlier calls left behind would be taken for this one's.
        if self.is_qwen:
            self.model.model.rope_deltas = None
        inputs = self._inputs(prompt, ids)
        rows: Tensor = self.model.model(**inputs, use_cache=False).last_hidden_state[0]
        return rows

    @torch.inference_mode()
    def logits(self, hidden_states: Tensor) -> Tensor:
        """Of rows after the final norm."""
        rows: Tensor = self.model.lm_head(hidden_states)
        return rows

    @torch.inference_mode()
    def image_rows(self, image: MultiModalInput) -> Tensor:
        """``(length, hidden)`` of one image."""
        output = self.model.get_image_features(**self._image_features([image]), return_dict=True)
        (rows,) = output.pooler_output
        return rows

    @torch.inference_mode()
    def greedy(self, prompt: ImagePrompt, num_tokens: int) -> GreedyAnswer:
        """``generate`` without stopping at EOS."""
        out = self.model.generate(
            **self._inputs(prompt, torch.tensor([prompt.token_ids])),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        generated = out.sequences[0, -num_tokens:].tolist()
        tops = [logits[0].topk(2).values.tolist() for logits in out.logits]
        hidden = self.hidden_states(prompt, generated[:-1])
        return GreedyAnswer(generated, [a - b for a, b in tops], hidden)

    def _inputs(self, prompt: ImagePrompt, ids: Tensor) -> dict[str, Tensor]:
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.is_qwen:
            is_image = ids == self.model.config.image_token_id
            # A generated token of that id is no image.
            is_image[:, len(prompt) :] = False
            inputs["mm_token_type_ids"] = is_image.long()
        return inputs | (self._image_features(prompt.images) if prompt.images else {})

    def _image_features(self, images: Sequence[MultiModalInput]) -> dict[str, Tensor]:
        columns = {name: [image.features[name] for image in images] for name in images[0].features}
        if self.is_qwen:
            pixels, grids = columns["pixel_values"], columns["image_grid_thw"]
            return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.stack(grids)}
        return {"pixel_values": torch.stack(columns["pixel_values"])}
