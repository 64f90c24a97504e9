"""Prompts with images and videos, through the whole engine, against transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, TextPrompt, TokensPrompt
from engine.interface.prompts import VideoFeatures
from omni.seeded.language_models import (
    build_gemma3_vision,
    build_llava,
    build_qwen2_5_vl,
    build_qwen3_5,
    build_qwen3_vl,
)
from tests.support.encoder_decoder_reference import assert_greedy_choices
from tests.support.native_kernels import needs_kernels
from tests.support.pictures import PLACEHOLDER, picture
from tests.support.thinker_reference import clip

NUM_TOKENS = 12
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "llava": build_llava,
    "llava of all rows over qwen2": partial(build_llava, strategy="full", model_type="qwen2"),
    "llava tied": partial(build_llava, tie_word_embeddings=True),
    "llava over mistral": partial(build_llava, model_type="mistral", sliding_window=18),
    "llava over qwen3": partial(build_llava, model_type="qwen3", head_dim=16),
    "qwen2_5_vl": build_qwen2_5_vl,
    "llava with one key head": partial(build_llava, num_key_value_heads=1),
    "qwen2_5_vl tied": partial(build_qwen2_5_vl, tied=True),
    "qwen2_5_vl with one key head": partial(build_qwen2_5_vl, num_key_value_heads=1),
    "qwen3_vl of experts": partial(build_qwen3_vl, experts=True),
    "qwen3_5_vision": partial(build_qwen3_5, tied=True),
    "qwen3_5_vision of experts": partial(build_qwen3_5, experts=True),
    "gemma3_vision": partial(build_gemma3_vision, sliding_window=8),
    "gemma3_vision in steps of 7": partial(build_gemma3_vision, rows=4),
}


class Reference:
    """A checkpoint loaded by transformers, with its image processor."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    @torch.inference_mode()
    def rows_and_logits(
        self, prompt: Sequence[int], answer: Sequence[int], images: Sequence[Image.Image]
    ) -> tuple[Tensor, Tensor]:
        """Compute rows and logits of an expanded prompt and its answer in one pass.

        Not by ``generate``, which continues each axis from the last token after an image.
        """
        ids = torch.tensor([[*prompt, *answer]])
        shown = dict(self.processor(images=list(images), return_tensors="pt")) if images else {}
        if self.model.config.model_type.startswith("qwen"):
            # Otherwise the state of earlier calls would be used.
            self.model.model.rope_deltas = None
            is_image = ids == self.model.config.image_token_id
            # A generated token with that id is not an image.
            is_image[:, len(prompt) :] = False
            shown["mm_token_type_ids"] = is_image.long()
        if self.model.config.model_type == "gemma3":
            shown["token_type_ids"] = (ids == self.model.config.image_token_id).long()
        output = self.model.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **shown
        )
        rows: Tensor = output.last_hidden_state[0]
        return rows, self.model.lm_head(rows)


KERNELS = [
    *("llava", "qwen2_5_vl", "llava over mistral"),
    *("llava with one key head", "qwen2_5_vl with one key head", "gemma3_vision in steps of 7"),
]


@pytest.mark.shows("parity", "hidden states", "prefix hits", "images")
@pytest.mark.parametrize(
    ("name", "block_size", "budget", "backend"),
    [
        *((name, 4, 64, "torch") for name in BUILDERS if " one " not in name and " 7" not in name),
        *((name, 16, 512, "torch") for name in ("llava", "qwen3_vl of experts", "qwen3_5_vision")),
        ("gemma3_vision", 8, 512, "torch"),  # its window has 8 tokens
        *(pytest.param(name, 4, 7, "native", marks=needs_kernels) for name in KERNELS),
    ],
)
def test_mixed_requests_equal_transformers(
    name: str, block_size: int, budget: int, backend: str, tmp_path: Path
) -> None:
    """Chunks of seven end inside images where allowed; unwritten pages hold NaN."""
    folder, place = BUILDERS[name](tmp_path / "model"), PLACEHOLDER[name.split()[0]]
    shown = [[picture(0), picture(3)], [], [picture(0)], [picture(2)], [picture(1), picture(2)]]
    texts = [f"See {place} and {place} now", "The harbour wakes", f"See {place}."]
    texts += [f"{place}What?", f"At the end {place} and {place}"]
    prompts = [
        TextPrompt(text, multi_modal_data={"image": images})
        for text, images in zip(texts, shown, strict=True)
    ]
    engine = LLMEngine(
        EngineConfig.model_validate(
            {
                "model": str(folder),
                "block_size": block_size,
                "num_blocks": 160,
                "max_num_seqs": 4,
                "max_num_batched_tokens": budget,
                "attention_backend": backend,
            }
        )
    )
    memory = engine._runner._memory
    memory.buffer[memory.config.large_page_bytes :] = 0xFF
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    reference = Reference(folder)
    cold, warm = engine.generate(prompts, greedy), engine.generate(prompts, greedy)
    for images, *both in zip(shown, cold, warm, strict=True):
        ids, answer = both[0].prompt_token_ids, both[0].outputs[0].token_ids
        expected, logits = reference.rows_and_logits(ids, answer[:-1], images)
        assert_greedy_choices(logits[len(ids) - 1 :], answer)
        for output in both:
            assert (output.prompt_token_ids, output.outputs[0].token_ids) == (ids, answer)
            rows = output.outputs[0].tensors["hidden_states"]
            torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)
    assert len({output.outputs[0].token_ids for output in cold}) == len(cold)
    assert engine.stats().encoder_runs == 4


NUM_SHOWN = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_SHOWN, ignore_eos=True)
PLACES_PER_SECOND = 2

Piece = list[int] | Image.Image | VideoFeatures


def text(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(6, 700, (count,), generator=generator).tolist()
    return ids


# A clip has 2 x 3 rows per grid. The first three end in time before they end in width.
SHORT: dict[str, list[Piece]] = {
    "video": [text(4, 1), clip(1, grids=2, seconds=1.0), text(5, 2)],
    "grids at one place": [text(4, 1), clip(2, grids=3, seconds=0.25), text(3, 3)],
    "a single grid": [clip(3, grids=1), text(6, 4)],
    "text": [text(9, 5)],
}
LONG: dict[str, list[Piece]] = {
    "video that outlasts its width": [text(4, 1), clip(4, grids=5, seconds=1.0), text(5, 2)],
    "seconds between grids": [text(2, 6), clip(5, grids=4, seconds=2.5), text(3, 3)],
    "fractions of places": [text(3, 7), clip(6, grids=6, seconds=0.7), text(3, 8)],
    "videos and pictures": [
        picture(0),
        text(3, 9),
        clip(7, grids=4, seconds=3.0),
        picture(2),
        text(1, 2),
        clip(4, grids=5, seconds=1.0),
        text(1, 4),
        clip(1, grids=2, seconds=1.0),
        text(4, 3),
    ],
}
TALKS = SHORT | LONG


@dataclass(frozen=True)
class Shown:
    """A prompt in transformers' form."""

    ids: Tensor
    kinds: Tensor
    places: Tensor
    features: dict[str, Tensor]


class VideoReference:
    """A checkpoint loaded by transformers; token positions are counted here, one by one."""

    def __init__(self, folder: str) -> None:
        loaded: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model = loaded.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def prompt(self, pieces: Sequence[Piece]) -> TokensPrompt:
        """Return the engine's prompt."""
        config, ids = self.model.config, list[int]()
        items: dict[str, list[Any]] = {}
        for piece in pieces:
            match piece:
                case list():
                    ids += piece
                case VideoFeatures():
                    ids.append(config.video_token_id)
                    items.setdefault("video", []).append(piece)
                case _:
                    ids.append(config.image_token_id)
                    items.setdefault("image", []).append(piece)
        return TokensPrompt(tuple(ids), items)

    def shown(self, pieces: Sequence[Piece]) -> Shown:
        ids, kinds, places, parts = list[int](), list[int](), list[list[int]](), dict[str, Any]()
        for piece in pieces:
            begin = max(map(max, places), default=-1) + 1
            if isinstance(piece, list):
                ids += piece
                kinds += [0] * len(piece)
                places += [[begin + n] * 3 for n in range(len(piece))]
                continue
            kind, grid, seconds, features = self._features(piece)
            for name, value in features.items():
                parts.setdefault(name, []).append(value)
            rows = [
                [begin + int(t * seconds * PLACES_PER_SECOND), begin + h, begin + w]
                for t in range(grid[0])
                for h in range(grid[1] // 2)
                for w in range(grid[2] // 2)
            ]
            placeholders = (self.model.config.image_token_id, self.model.config.video_token_id)
            ids += [placeholders[kind - 1]] * len(rows)
            kinds += [kind] * len(rows)
            places += rows
        features = {name: torch.cat(values) for name, values in parts.items()}
        return Shown(torch.tensor([ids]), torch.tensor([kinds]), torch.tensor(places).T, features)

    def _features(
        self, piece: Image.Image | VideoFeatures
    ) -> tuple[int, list[int], float, dict[str, Tensor]]:
        """Return transformers' number of its kind, its grid, seconds between grids, tensors."""
        if isinstance(piece, VideoFeatures):
            grid, seconds = [int(side) for side in piece.video_grid_thw], piece.second_per_grid
            tensors = {
                "pixel_values_videos": piece.pixel_values_videos,
                "video_grid_thw": torch.tensor([grid]),
                "second_per_grid_ts": torch.tensor([seconds]),
            }
            return 2, grid, seconds, tensors
        made: dict[str, Tensor] = dict(self.images(images=piece, return_tensors="pt"))
        return 1, made["image_grid_thw"][0].tolist(), 0.0, made

    @torch.inference_mode()
    def rows(self, shown: Shown, answer: Sequence[int]) -> Tensor:
        """Compute hidden states of prompt and answer, except its last token, in one pass."""
        follow = torch.arange(len(answer) - 1) + int(shown.places.max()) + 1
        places = torch.cat([shown.places, follow.expand(3, -1)], dim=1)
        self.model.model.rope_deltas = None
        output = self.model.model(
            input_ids=torch.cat([shown.ids, torch.tensor([list(answer[:-1])]).long()], dim=1),
            position_ids=places[:, None],
            use_cache=False,
            **shown.features,
        )
        rows: Tensor = output.last_hidden_state[0]
        return rows

    @torch.inference_mode()
    def generate(self, shown: Shown) -> list[int]:
        """Generate by transformers alone, with the positions that it computes."""
        self.model.model.rope_deltas = None
        output = self.model.generate(
            input_ids=shown.ids,
            attention_mask=torch.ones_like(shown.ids),
            mm_token_type_ids=shown.kinds,
            do_sample=False,
            max_new_tokens=NUM_SHOWN,
            eos_token_id=None,
            **shown.features,
        )
        ids: list[int] = output[0, shown.ids.shape[1] :].tolist()
        return ids


class DatedReference(VideoReference):
    """A reference whose video text and positions come from transformers alone."""

    def shown(self, pieces: Sequence[Piece]) -> Shown:
        config, ids, parts = self.model.config, list[int](), dict[str, Any]()
        for piece in pieces:
            if isinstance(piece, list):
                ids += piece
                continue
            _, grid, _, features = self._features(piece)
            features.pop("second_per_grid_ts", None)
            for name, value in features.items():
                parts.setdefault(name, []).append(value)
            if isinstance(piece, VideoFeatures):
                text = self._written(piece)
                ids += self.tokenizer(text, add_special_tokens=False)["input_ids"]
            else:
                ids += [config.image_token_id] * (math.prod(grid) // 4)
        together = {name: torch.cat(values) for name, values in parts.items()}
        row = torch.tensor([ids])
        kinds = (row == config.image_token_id) + 2 * (row == config.video_token_id)
        grids = {name: together.get(name) for name in ("image_grid_thw", "video_grid_thw")}
        places, _ = self.model.model.get_rope_index(row, kinds, **grids)
        return Shown(row, kinds, places[:, 0], together)

    def _written(self, video: VideoFeatures) -> str:
        """Return the text of transformers' processor, whose video processor needs torchvision."""
        grid = torch.as_tensor(video.video_grid_thw)
        processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
        processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
        processor.video_token = self.tokenizer.decode([self.model.config.video_token_id])
        processor.vision_start_token = "<|vision_start|>"
        processor.vision_end_token = "<|vision_end|>"
        frames = SimpleNamespace(
            fps=2 / video.second_per_grid, frames_indices=list(range(2 * int(grid[0])))
        )
        inputs = {"video_grid_thw": grid[None], "video_metadata": [frames]}
        text: str = processor.replace_video_token(inputs, 0)
        return text


REFERENCES = {
    "qwen2_5_vl": VideoReference,
    **dict.fromkeys(("qwen3_vl", "qwen3_5_vision"), DatedReference),
}


@pytest.fixture(scope="module")
def references(seeded: Callable[[str], str]) -> dict[str, VideoReference]:
    return {family: make(seeded(family)) for family, make in REFERENCES.items()}


@pytest.fixture
def reference(references: dict[str, VideoReference]) -> VideoReference:
    return references["qwen2_5_vl"]


def build(folder: str, block_size: int, budget: int, num_seqs: int) -> LLMEngine:
    return LLMEngine(
        EngineConfig(
            model=folder,
            block_size=block_size,
            num_blocks=2048 // block_size,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=256,
        )
    )


def assert_equal(reference: VideoReference, pieces: Sequence[Piece], output: RequestOutput) -> None:
    assert output.error is None
    shown, answer = reference.shown(pieces), output.outputs[0].token_ids
    assert list(output.prompt_token_ids) == shown.ids[0].tolist()
    expected = reference.rows(shown, answer)
    torch.testing.assert_close(
        output.outputs[0].tensors["hidden_states"], expected, atol=1e-4, rtol=0
    )
    with torch.inference_mode():
        logits = reference.model.lm_head(expected[shown.ids.shape[1] - 1 :])
    assert_greedy_choices(logits, list(answer))


@pytest.mark.shows("parity", "hidden states", "prefix hits", "images")
@pytest.mark.parametrize(
    ("family", "block_size", "budget", "num_seqs"),
    [
        ("qwen2_5_vl", 4, 256, 4),
        ("qwen2_5_vl", 16, 256, 8),
        ("qwen2_5_vl", 4, 7, 3),
        ("qwen3_vl", 16, 256, 8),
        ("qwen3_vl", 4, 7, 3),
    ],
)
def test_mixed_requests_equal_transformers_cold_and_warm(
    references: dict[str, VideoReference],
    seeded: Callable[[str], str],
    family: str,
    block_size: int,
    budget: int,
    num_seqs: int,
) -> None:
    reference = references[family]
    engine = build(seeded(family), block_size, budget, num_seqs)
    prompts = [reference.prompt(pieces) for pieces in TALKS.values()]
    for temperature in ("cold", "warm"):
        for pieces, output in zip(TALKS.values(), engine.generate(prompts, GREEDY), strict=True):
            assert_equal(reference, pieces, output)
            if temperature == "warm":
                last = output.num_prompt_tokens - 1
                assert output.num_cached_tokens == last // block_size * block_size
    stats = engine.stats().kv
    assert stats is not None and stats.items is not None and stats.items.held == 0
    engine.check_integrity()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("qwen2_5_vl", name) for name in SHORT),
        ("qwen3_vl", "videos and pictures"),
        ("qwen3_5_vision", "videos and pictures"),
    ],
)
def test_generate_of_transformers_gives_the_same(
    references: dict[str, VideoReference], seeded: Callable[[str], str], family: str, name: str
) -> None:
    """Videos that end in time before height or width, for families where that matters."""
    reference = references[family]
    shown = reference.shown(TALKS[name])
    (output,) = build(seeded(family), 4, 64, 1).generate(reference.prompt(TALKS[name]), GREEDY)
    assert list(output.outputs[0].token_ids) == reference.generate(shown)


@pytest.mark.parametrize("name", TALKS)
def test_places_of_videos_equal_transformers(reference: VideoReference, name: str) -> None:
    """Positions relative to each item's beginning, which changed in transformers 5.3."""
    shown = reference.shown(TALKS[name])
    grids = {
        f"{kind}_grid_thw": shown.features.get(f"{kind}_grid_thw") for kind in ("image", "video")
    }
    theirs, _ = reference.model.model.get_rope_index(
        shown.ids, shown.kinds, **grids, second_per_grid_ts=shown.features.get("second_per_grid_ts")
    )
    if name in SHORT:
        assert torch.equal(theirs[:, 0], shown.places)
    for begin, end in _runs(shown.kinds[0].tolist()):
        ours, expected = shown.places[:, begin:end], theirs[:, 0, begin:end]
        assert torch.equal(ours - ours[0, 0], expected - expected[0, 0])


def _runs(kinds: list[int]) -> list[tuple[int, int]]:
    """Return begin and end of each run of one kind."""
    borders = [n for n in range(1, len(kinds)) if kinds[n] != kinds[n - 1]]
    return list(zip([0, *borders], [*borders, len(kinds)], strict=True))


@pytest.mark.parametrize("family", REFERENCES)
def test_answers_depend_on_frames_and_on_their_times(
    references: dict[str, VideoReference], family: str
) -> None:
    """Guards parity against being vacuous."""
    reference = references[family]
    shown = [clip(4, grids=5, seconds=1.0), clip(4, grids=5, seconds=2.0), clip(5, grids=5)]
    rows = [reference.rows(reference.shown([text(4, 1), each, text(5, 2)]), [7]) for each in shown]
    assert all(float((rows[0][-1] - each[-1]).abs().max()) > 1e-2 for each in rows[1:])
