"""Conversations with images, sound and videos, and transformers' thinker outputs for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniProcessor,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    Qwen3OmniMoeProcessor,
    _get_feat_extract_output_lengths,
)

from engine import ChatPrompt, VideoFeatures
from engine.checkpoints.config_file import quiet_config_log

RATE = 16_000
_MERGED = 4  # patches to a row
_MARK = "<tts_pad>"


@cache
def tone(seconds: float, hertz: float = 300.0, rate: int = RATE) -> NDArray[np.float32]:
    """Return a pure tone; a second of it takes 25 placeholders."""
    samples: NDArray[np.float64] = np.sin(
        2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate
    )
    return (0.5 * samples).astype(np.float32)


@cache
def clip(seed: int, grids: int = 2, seconds: float = 0.5) -> VideoFeatures:
    """Return a video of noise, ``grids`` of 4 x 6 patches, which are 6 placeholders each."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(grids * 24, 3 * 2 * 14 * 14, generator=generator)
    return VideoFeatures(pixels, (grids, 4, 6), seconds)


def talkie(
    seed: int, sound: NDArray[np.float32], grids: int = 2, seconds: float = 0.5
) -> VideoFeatures:
    """Return a :func:`clip` with its own sound."""
    return replace(clip(seed, grids, seconds), audio=sound)


@dataclass(frozen=True)
class Talk:
    """A user's message: texts, pictures, samples and videos in order."""

    content: Sequence[str | Image.Image | NDArray[np.float32] | VideoFeatures]
    tail: tuple[str, ...] = field(default=())

    @property
    def images(self) -> list[Image.Image]:
        return [part for part in self.content if isinstance(part, Image.Image)]

    @property
    def sounds(self) -> list[NDArray[np.float32]]:
        return [part for part in self.content if isinstance(part, np.ndarray)]

    @property
    def videos(self) -> list[VideoFeatures]:
        return [part for part in self.content if isinstance(part, VideoFeatures)]

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        kinds = {np.ndarray: "audio", VideoFeatures: "video"}
        parts = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": kinds.get(type(part), "image")}
            for part in self.content
        ]
        turns = [{"role": "user", "content": parts}]
        roles = ("assistant", "user")
        return (*turns, *({"role": roles[n % 2], "content": t} for n, t in enumerate(self.tail)))

    @property
    def prompt(self) -> ChatPrompt:
        shown: dict[str, list[Any]] = {
            "image": self.images,
            "audio": self.sounds,
            "video": self.videos,
        }
        return ChatPrompt(self.messages, {name: items for name, items in shown.items() if items})


@dataclass(frozen=True)
class ThinkerAnswer:
    """The reference for one request; rows for all tokens but the last.

    ``margins`` are the gaps between the two largest logits, as in ``GreedyAnswer``.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    margins: list[float]
    hidden_states: Tensor
    position_ids: Tensor
    token_embeds: Tensor | None = None
    speech_rows: Tensor | None = None


class NoVideos:
    """Stands in for transformers' video processor, which needs torchvision."""

    model_input_names = ("pixel_values_videos", "video_grid_thw")
    merge_size = temporal_patch_size = 2


class _Lenient:
    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        if name == "video_processor":
            return type(argument)
        return super().check_argument_for_proper_class(name, argument)  # type: ignore[misc]


class Processor(_Lenient, Qwen2_5OmniProcessor):  # type: ignore[misc]
    """Qwen2.5-Omni's processor, without videos."""


class _Processor3(_Lenient, Qwen3OmniMoeProcessor):  # type: ignore[misc]
    pass


_FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2_5_omni": (Qwen2_5OmniForConditionalGeneration, Processor),
    "qwen3_omni_moe": (Qwen3OmniMoeForConditionalGeneration, _Processor3),
}


class ThinkerReference:
    """The thinker of a checkpoint in transformers, run greedily without stopping at EOS."""

    def __init__(self, folder: str) -> None:
        with quiet_config_log():
            self.family = AutoConfig.from_pretrained(folder).model_type
            model_class, processor_class = _FAMILIES[self.family]
            whole = model_class.from_pretrained(folder, dtype=torch.float32)
        self.whole = whole.eval()
        self.model = whole.thinker
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = processor_class(
            AutoImageProcessor.from_pretrained(folder, backend="pil"),
            NoVideos(),
            AutoFeatureExtractor.from_pretrained(folder),
            self.tokenizer,
            chat_template=self.tokenizer.chat_template,
        )
        config = self.model.config
        self.placeholders = (config.image_token_id, config.audio_token_id, config.video_token_id)

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Ids that neither side may generate: a placeholder without an item has no position."""
        kept = self.tokenizer.eos_token_id
        return tuple(index for index in self.tokenizer.all_special_ids if index != kept)

    def inputs(self, talk: Talk) -> dict[str, Any]:
        """Return the inputs of transformers' processor; videos are inserted separately."""
        text = self.tokenizer.apply_chat_template(
            list(talk.messages), tokenize=False, add_generation_prompt=True
        )
        # The processor needs a video for the placeholder, and a processor for the video.
        text = text.replace(self.tokenizer.video_token, _MARK)
        kinds = {"images": talk.images, "audio": talk.sounds}
        given = {name: items for name, items in kinds.items() if items}
        inputs: dict[str, Any] = dict(self.processor(text=text, return_tensors="pt", **given))
        if talk.videos:
            inputs |= self._videos(inputs["input_ids"][0].tolist(), talk.videos)
        if any(video.audio is not None for video in talk.videos):
            inputs |= self._sounds(talk)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return inputs

    def _videos(self, ids: list[int], videos: Sequence[VideoFeatures]) -> dict[str, Tensor]:
        grids = torch.stack([torch.as_tensor(video.video_grid_thw) for video in videos])
        mark, shown = self.tokenizer.get_vocab()[_MARK], iter(videos)
        runs = [self._expand(next(shown)) if index == mark else [index] for index in ids]
        return {
            "input_ids": torch.tensor([list(chain.from_iterable(runs))]),
            "pixel_values_videos": torch.cat([video.pixel_values_videos for video in videos]),
            "video_grid_thw": grids,
            "video_second_per_grid": torch.tensor([video.second_per_grid for video in videos]),
        }

    def _expand(self, video: VideoFeatures) -> list[int]:
        """Expand by the processor's own function if there is sound."""
        grid = torch.as_tensor(video.video_grid_thw).tolist()
        if video.audio is None:
            return [self.model.config.video_token_id] * (math.prod(grid) // _MERGED)
        lengths = self._features([video.audio])["feature_attention_mask"].sum(-1)
        text = self.processor.replace_video_with_audio_token(
            {"video_grid_thw": [grid], "video_second_per_grid": [video.second_per_grid]},
            0,
            {"num_audio_tokens": self._num_rows(lengths).numpy()},
            0,
            position_id_per_seconds=self.model.config.position_id_per_seconds,
            seconds_per_chunk=getattr(self.model.config, "seconds_per_chunk", None),
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _num_rows(self, lengths: Tensor) -> Tensor:
        if self.family == "qwen2_5_omni":
            return ((lengths - 1) // 2 - 1) // 2 + 1
        return _get_feat_extract_output_lengths(lengths)

    def _sounds(self, talk: Talk) -> dict[str, Any]:
        """Return all sounds in order of position, alone or in a video."""
        sounds = [
            part.audio if isinstance(part, VideoFeatures) else part
            for part in talk.content
            if isinstance(part, VideoFeatures | np.ndarray)
        ]
        return self._features(sounds) | {"use_audio_in_video": True}

    def _features(self, sounds: Sequence[Any]) -> dict[str, Any]:
        output = self.processor.feature_extractor(
            sounds,
            sampling_rate=RATE,
            padding="max_length" if self.family == "qwen2_5_omni" else True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return {
            "input_features": output["input_features"],
            "feature_attention_mask": output["attention_mask"],
        }

    @torch.inference_mode()
    def answer(self, talk: Talk, num_tokens: int) -> ThinkerAnswer:
        """Run ``generate``, and one pass over prompt and answer."""
        inputs = self.inputs(talk)
        prompt = inputs.pop("input_ids")
        self.model.model.rope_deltas = None
        out = self.model.generate(
            input_ids=prompt,
            **inputs,
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            suppress_tokens=list(self.suppressed),
            output_scores=True,
            return_dict_in_generate=True,
        )
        tops = [scores[0].topk(2).values.tolist() for scores in out.scores]
        ids = out.sequences[:, :-1]
        inputs["attention_mask"] = torch.ones_like(ids)
        self.model.model.rope_deltas = None
        passed = self.model.model(
            input_ids=ids, **inputs, use_cache=False, output_hidden_states=True
        )
        embeds = self.model.get_input_embeddings()(ids[0])
        shows = torch.isin(ids[0], torch.tensor(self.placeholders))
        if self.family == "qwen2_5_omni":
            embeds[shows] = 0
            handed_on = {"token_embeds": embeds}
        else:
            layer = self.whole.config.talker_config.accept_hidden_layer
            embeds[shows] = passed.hidden_states[layer][0, shows]
            handed_on = {"speech_rows": embeds}
        return ThinkerAnswer(
            prompt[0].tolist(),
            out.sequences[0, prompt.shape[1] :].tolist(),
            [first - second for first, second in tops],
            passed.last_hidden_state[0],
            self._places(ids, inputs),
            **handed_on,
        )

    def _places(self, ids: Tensor, inputs: dict[str, Any]) -> Tensor:
        mask = inputs.get("feature_attention_mask")
        places, _ = self.model.get_rope_index(
            ids,
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            inputs["attention_mask"],
            audio_seqlens=None if mask is None else mask.sum(1),
            second_per_grids=inputs.get("video_second_per_grid"),
            use_audio_in_video=inputs.get("use_audio_in_video", False),
        )
        table: Tensor = places[:, 0].T
        return table
