"""Decoders that see images, against transformers, over packed mixed batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, LlavaProcessor

from engine.checkpoints.checkpoint import Checkpoint
from engine.models.base import ModelSettings
from engine.models.model_loader import find_family, load_model
from engine.models.multimodal import MultiModalModel
from engine.requests.encoder_input import MultiModalInput
from omni.seeded.multimodal import build_llava, build_qwen2_5_vl
from tests.support.encoder_decoder_reference import assert_greedy_choices
from tests.support.greedy_reference import GreedyAnswer, assert_greedy
from tests.support.multimodal_run import (
    Features,
    ImagePrompt,
    MultiModalReference,
    MultiModalRun,
    join,
)
from tests.support.native_kernels import needs_kernels

MAX_LEN = 96
NUM_TOKENS = 12
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "llava": build_llava,
    "llava of all rows over qwen2": partial(build_llava, strategy="full", model_type="qwen2"),
    "llava tied": partial(build_llava, tie_word_embeddings=True),
    "llava over mistral": partial(build_llava, model_type="mistral", sliding_window=18),
    "llava over qwen3": partial(build_llava, model_type="qwen3", head_dim=16),
    "qwen2.5-vl": build_qwen2_5_vl,
    "qwen2.5-vl tied": partial(build_qwen2_5_vl, tied=True),
}


def load(folder: Path, **options: Any) -> MultiModalModel:
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "block_size": 4,
        "max_model_len": MAX_LEN,
    }
    model = load_model(Checkpoint.open(folder), ModelSettings(**(settings | options)))
    assert isinstance(model, MultiModalModel)
    return model


def image(model: MultiModalModel, seed: int, *, wide: bool = False) -> Features:
    """Noise; for Qwen2.5-VL in 4 x 4 rows, which are several windows, or in 2 x 3."""
    generator = torch.Generator().manual_seed(seed)
    if "image_grid_thw" not in model.towers["image"].feature_names:
        return {"pixel_values": torch.randn(3, 56, 56, generator=generator)}
    height, width = (4, 6) if wide else (8, 8)
    return {
        "pixel_values": torch.randn(height * width, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([1, height, width]),
    }


def text(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(6, 700, (count,), generator=generator).tolist()
    return ids


@dataclass(frozen=True)
class Family:
    """A checkpoint, the model here, the same in transformers, and prompts for both."""

    folder: Path
    model: MultiModalModel
    theirs: MultiModalReference
    prompts: list[ImagePrompt]

    @cached_property
    def answers(self) -> list[GreedyAnswer]:
        """Theirs to the prompts; chunks and backends are compared with the same."""
        return [self.theirs.greedy(prompt, NUM_TOKENS) for prompt in self.prompts]


@pytest.fixture(scope="module", params=BUILDERS)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    folder = BUILDERS[request.param](tmp_path_factory.mktemp("multimodal"))
    model = load(folder)
    square, wide = image(model, 1), image(model, 2, wide=True)
    pieces: list[list[list[int] | Features]] = [
        [text(23, 1)],
        [text(5, 2), wide, text(7, 3)],
        [square, text(3, 4), wide, text(1, 5)],
    ]
    prompts = [join(piece, model) for piece in pieces]
    yield Family(folder, model, MultiModalReference(str(folder)), prompts)


def run(
    model: MultiModalModel, prompts: list[ImagePrompt], chunk: int, num_tokens: int, backend: str
) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy answers and all hidden states; request ``r`` joins at step ``r``."""
    lengths = [len(prompt) + num_tokens - 1 for prompt in prompts]
    packed = MultiModalRun(model, prompts, lengths, backend=backend)
    sequences = [list(prompt.token_ids) for prompt in prompts]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    steps = 0
    while packed.done != lengths:
        steps += 1
        chunks = [
            torch.tensor(ids[done : min(done + chunk, length)] if r < steps else [])
            for r, (ids, done, length) in enumerate(
                zip(sequences, packed.done, lengths, strict=True)
            )
        ]
        chunks = [ids.long() for ids in chunks]
        for r, hidden in enumerate(packed.step(chunks)):
            rows[r].append(hidden)
            if len(hidden) and packed.done[r] == len(sequences[r]):
                sequences[r].append(int(model.compute_logits(hidden[-1:]).argmax()))
    answers = [ids[len(prompt) :] for ids, prompt in zip(sequences, prompts, strict=True)]
    return answers, [torch.cat(parts) for parts in rows]


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_kernels)])
@pytest.mark.parametrize("chunk", [5, MAX_LEN])
def test_tokens_and_hidden_states_equal_transformers(family: Family, chunk: int, backend: str):
    answers, rows = run(family.model, family.prompts, chunk, NUM_TOKENS, backend)
    for expected, answer, hidden in zip(family.answers, answers, rows, strict=True):
        if assert_greedy(expected, answer):
            torch.testing.assert_close(hidden, expected.hidden_states, atol=1e-4, rtol=0)


def test_what_follows_an_image_at_the_end_equals_full_passes(family: Family):
    # There transformers' generate() counts each axis on from the last token, unlike its own
    # full pass, which goes on after the largest number.
    square, wide = image(family.model, 1), image(family.model, 2, wide=True)
    prompt = join([text(2, 6), wide, text(2, 7), square], family.model)
    (answer,), (hidden,) = run(family.model, [prompt], 5, NUM_TOKENS, "torch")
    expected = family.theirs.hidden_states(prompt, answer[:-1])
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)
    assert_greedy_choices(family.theirs.logits(expected[len(prompt) - 1 :]), answer)


def test_chunks_of_five_end_inside_images(family: Family):
    """Otherwise the test above would not show that they may."""
    images = [entry for prompt in family.prompts for entry in prompt.images]
    assert any(entry.offset < cut < entry.end for entry in images for cut in range(0, 60, 5))


def test_rows_of_images_equal_transformers(family: Family):
    images = [entry for prompt in family.prompts for entry in prompt.images]
    for entry, rows in zip(images, family.model.encode_multimodal(images), strict=True):
        assert rows.shape == (entry.length, family.model.hidden_size)
        torch.testing.assert_close(rows, family.theirs.image_rows(entry), atol=1e-5, rtol=0)


def test_the_answer_depends_on_the_image(family: Family):
    ids = text(4, 8)
    prompts = [join([ids, image(family.model, seed), ids], family.model) for seed in (1, 2)]
    assert prompts[0].token_ids == prompts[1].token_ids
    (first, second), _ = run(family.model, prompts, MAX_LEN, NUM_TOKENS, "torch")
    assert first != second
    assert len(set(first)) > 4


def test_places_equal_transformers(family: Family):
    if not family.theirs.is_qwen:
        assert all(family.model.position_ids(p.token_ids, p.images) is None for p in family.prompts)
        return
    for prompt in family.prompts[1:]:
        ids = torch.tensor([prompt.token_ids])
        grids = torch.stack([entry.features["image_grid_thw"] for entry in prompt.images])
        expected, delta = family.theirs.model.model.get_rope_index(
            ids, (ids == family.model.placeholders["image"]).long(), image_grid_thw=grids
        )
        places = family.model.position_ids(prompt.token_ids, prompt.images)
        assert places is not None
        assert torch.equal(places, expected[:, 0])
        assert int(places.max()) + 1 - len(prompt) == int(delta)


def test_two_images_in_a_row_take_places_one_after_the_other(tmp_path: Path):
    model = load(build_qwen2_5_vl(tmp_path))
    prompt = join([image(model, 1, wide=True), image(model, 2)], model)
    places = model.position_ids(prompt.token_ids, prompt.images)
    assert places is not None
    assert places[:, :6].tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    assert places[:, 6].tolist() == [3, 3, 3]
    assert places[:, -1].tolist() == [3, 6, 6]


def test_text_placed_on_one_axis_equals_text_placed_on_three(tmp_path: Path):
    model = load(build_qwen2_5_vl(tmp_path))
    (rotary,) = model.decoder.rotaries  # type: ignore[misc]
    positions = torch.randperm(MAX_LEN)
    for one, three in zip(rotary(positions), rotary(positions.expand(3, -1)), strict=True):
        assert torch.equal(one, three)


def _nested(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


def _newer(name: str) -> str:
    """As recent exports name them: everything but the head in ``model.``."""
    if name.endswith("lm_head.weight"):
        return "lm_head.weight"
    name = name.replace("language_model.model.", "language_model.")
    if name.startswith(("vision_tower.", "multi_modal_projector.", "language_model.", "visual.")):
        return "model." + name
    return name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize(
    ("name", "rename"),
    [("llava", _nested), ("llava", _newer), ("qwen2.5-vl", _newer)],
)
def test_every_published_naming_of_weights_loads(
    name: str, rename: Callable[[str], str], tmp_path: Path
):
    folder = BUILDERS[name](tmp_path)
    before = load(folder).state_dict()
    weights = load_file(folder / "model.safetensors")
    renamed = {rename(key): tensor for key, tensor in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    after = load(folder).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_towers_keep_the_frequencies_of_their_own_type(tmp_path: Path):
    folder = build_qwen2_5_vl(tmp_path)
    wide, narrow = (load(folder, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    buffers = dict(wide.towers["image"].named_buffers())
    assert buffers
    for key, buffer in narrow.towers["image"].named_buffers():
        assert torch.equal(buffer, buffers[key])
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    (rows,) = narrow.encode_multimodal(join([image(narrow, 1)], narrow).images)
    assert rows.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llava", "llava tied", "qwen2.5-vl", "qwen2.5-vl tied"])
def test_weights_are_counted_with_the_tower(name: str, tmp_path: Path):
    folder = BUILDERS[name](tmp_path)
    stored = sum(tensor.nbytes for _, tensor in Checkpoint.open(folder).weights())
    assert load(folder, pack_weights=False).weight_nbytes == stored


@pytest.mark.parametrize("name", ["llava tied", "qwen2.5-vl tied"])
def test_a_tied_head_that_is_stored_as_well_is_left_there(name: str, tmp_path: Path):
    folder = BUILDERS[name](tmp_path)
    weights = load_file(folder / "model.safetensors")
    (embedding,) = (weights[key] for key in weights if key.endswith("embed_tokens.weight"))
    weights["lm_head.weight"] = torch.zeros_like(embedding)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    logits = load(folder).compute_logits(torch.eye(embedding.shape[1]))
    torch.testing.assert_close(logits, embedding.T)


def test_the_longest_sequence_is_the_text_parts(family: Family):
    checkpoint = Checkpoint.open(family.folder)
    assert find_family(checkpoint).max_positions(checkpoint.config) == 1024


def test_processors_of_the_checkpoint_give_what_the_tower_takes(family: Family):
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    processor = AutoImageProcessor.from_pretrained(family.folder, backend="pil")
    batch = processor(images=Image.fromarray(noise), return_tensors="pt")
    features = {name: batch[name] for name in family.model.towers["image"].feature_names}
    if not family.theirs.is_qwen:
        features = {name: tensor[0] for name, tensor in features.items()}
        tokenizer = AutoTokenizer.from_pretrained(family.folder)
        settings = json.loads((family.folder / "processor_config.json").read_text())
        del settings["processor_class"]
        ids = LlavaProcessor(processor, tokenizer, **settings)(
            images=Image.fromarray(noise), text="<image> what?"
        )["input_ids"][0]
        assert ids.count(family.model.placeholders["image"]) == family.model.num_rows(
            "image", features
        )
    length = family.model.num_rows("image", features)
    assert 1 < length <= 17
    (rows,) = family.model.encode_multimodal([MultiModalInput("image", 0, length, b"", features)])
    assert rows.shape == (length, family.model.hidden_size)


def test_chat_template_places_the_image(family: Family):
    tokenizer = AutoTokenizer.from_pretrained(family.folder)
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    for content, count in ((parts, 1), ("What is it?", 0)):
        message = {"role": "user", "content": content}
        prompt: Any = tokenizer.apply_chat_template([message], tokenize=False)
        assert tokenizer.encode(prompt).count(family.model.placeholders["image"]) == count
        assert prompt.endswith("What is it?<|eos|>\n")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llava", {"pixel_values": torch.zeros(3, 56, 55)}, r"must be \(3, 56, 56\), got"),
        ("llava", {"image_sizes": torch.zeros(2)}, "takes the features pixel_values; got"),
        ("qwen2.5-vl", {"image_grid_thw": torch.tensor([1, 8])}, "three numbers"),
        ("qwen2.5-vl", {"image_grid_thw": torch.tensor([2, 8, 4])}, "1 and two multiples of 2"),
        ("qwen2.5-vl", {"image_grid_thw": torch.tensor([1, 3, 8])}, "1 and two multiples of 2"),
        ("qwen2.5-vl", {"image_grid_thw": torch.tensor([1, 0, 8])}, "1 and two multiples of 2"),
        ("qwen2.5-vl", {"image_grid_thw": torch.tensor([1, 4, 8])}, "4 x 8 patches must be"),
    ],
)
def test_features_of_something_else_are_refused(
    name: str, change: Features, message: str, tmp_path: Path
):
    model = load(BUILDERS[name](tmp_path))
    with pytest.raises(ValueError, match=message):
        model.num_rows("image", image(model, 1) | change)


def test_placeholders_that_do_not_match_the_image_are_refused(family: Family):
    features = image(family.model, 1)
    wrong = MultiModalInput("image", 3, family.model.num_rows("image", features) + 1, b"", features)
    with pytest.raises(ValueError, match=r"at position 3 has 1\d placeholders; .* give 1\d rows"):
        family.model.encode_multimodal([wrong])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"text_config": {"model_type": "opt"}}, "a decoder of type 'opt'; supported are llama"),
        (
            {"vision_config": {"model_type": "pixtral"}},
            "a tower of type 'pixtral'; supported is clip",
        ),
    ],
)
def test_parts_that_are_not_supported_are_refused(
    part: dict[str, Any], message: str, tmp_path: Path
):
    folder = build_llava(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | part))
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_one_placeholder_for_two_modalities_is_refused(tmp_path: Path):
    folder = build_qwen2_5_vl(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["video_token_id"] = config["image_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"a placeholder of its own, got image (\d+), video \1$"):
        load(folder)


def test_sections_that_do_not_fit_the_heads_are_refused(tmp_path: Path):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    for sections in ([2, 3, 2], None):
        folder = build_qwen2_5_vl(tmp_path)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["rope_parameters"] = rope | (
            {} if sections is None else {"mrope_section": sections}
        )
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="mrope_section"):
            load(folder)
