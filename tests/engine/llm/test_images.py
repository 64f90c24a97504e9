"""Images in prompts: what is encoded, when, what is held meanwhile, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, LlavaProcessor

from engine import (
    ChatPrompt,
    EncoderEngine,
    EngineConfig,
    ExplicitEncoderDecoderPrompt,
    LLMEngine,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from engine.models.multimodal import MultiModalModel
from engine.requests.encoder_input import MultiModalInput
from engine.scheduling.scheduler import Scheduler, SchedulerOutput
from prefix_cache import GroupStats
from tests.support.pictures import PLACEHOLDER, picture

BLOCK_SIZE = 4
ROW_BYTES = 64 * 4
NOTHING = SamplingParams(temperature=0.0, max_tokens=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Eyes:
    """Counts what the towers are shown, and what the decoders run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoded: list[int] = []  # images of each run of the tower
        self.scheduled: list[int] = []  # tokens of each step
        encode, schedule = MultiModalModel.encode_multimodal, Scheduler.schedule

        def counting(model: MultiModalModel, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
            self.encoded.append(len(inputs))
            return encode(model, inputs)

        def noting(scheduler: Scheduler) -> SchedulerOutput:
            output = schedule(scheduler)
            self.scheduled.append(output.num_tokens)
            return output

        monkeypatch.setattr(MultiModalModel, "encode_multimodal", counting)
        monkeypatch.setattr(Scheduler, "schedule", noting)


@pytest.fixture
def eyes(monkeypatch: pytest.MonkeyPatch) -> Eyes:
    return Eyes(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_vl")


def build(checkpoint: str, **settings: Any) -> LLMEngine:
    usual = {"block_size": BLOCK_SIZE, "num_blocks": 64, "max_num_seqs": 4, "max_model_len": 200}
    return LLMEngine(EngineConfig(model=checkpoint, **(usual | settings)))


@pytest.fixture
def engine(shared_engine: LLMEngine) -> Iterator[LLMEngine]:
    shared_engine.reset_prefix_cache()
    yield shared_engine
    shared_engine.check_integrity()
    assert item_pages(shared_engine).held == 0


@pytest.fixture(scope="module")
def shared_engine(checkpoint: str) -> LLMEngine:
    return build(checkpoint)


def placeholder(engine: LLMEngine) -> int:
    assert engine.tokenizer is not None
    return int(engine.tokenizer.convert_tokens_to_ids(PLACEHOLDER["qwen2_5_vl"]))


def shows(engine: LLMEngine, *content: int | Image.Image) -> TokensPrompt:
    """Token ids and pictures in their places."""
    pictures = [part for part in content if not isinstance(part, int)]
    ids = tuple(part if isinstance(part, int) else placeholder(engine) for part in content)
    return TokensPrompt(ids, {"image": pictures})


def item_pages(engine: LLMEngine) -> GroupStats:
    stats = engine.stats().kv
    assert stats is not None and stats.items is not None
    return stats.items


def hidden_states(engine: LLMEngine, prompt: TokensPrompt) -> Tensor:
    return engine.generate(prompt, NOTHING)[0].outputs[0].tensors["hidden_states"]


def test_an_image_whose_blocks_all_hit_is_not_encoded(engine: LLMEngine, eyes: Eyes) -> None:
    prompt = shows(engine, picture(0), 7, 8, 9, 10)
    engine.generate(prompt, NOTHING)
    for _ in range(item_pages(engine).cached):
        engine._kv.pool.evict(engine._kv.config.item_group_id)
    assert engine.generate(prompt, NOTHING)[0].num_cached_tokens == 8
    assert eyes.encoded == [1]
    # In the middle of the image it has to be, as its other rows are needed.
    assert engine.generate(shows(engine, picture(0), 11), NOTHING)[0].num_cached_tokens == 4
    assert eyes.encoded == [1, 1]


def test_a_chunk_may_end_inside_an_image(checkpoint: str, eyes: Eyes) -> None:
    engine = build(checkpoint, max_num_batched_tokens=4, max_num_seqs=1)
    prompt = shows(engine, 5, 6, picture(0), 7, 8, picture(1), 9)
    expected = hidden_states(build(checkpoint), prompt)
    eyes.encoded.clear()
    engine.add_request("one", prompt, NOTHING)
    held = []
    while engine.has_unfinished_requests:
        outputs = engine.step()
        held.append(item_pages(engine).held)
    # 0 1 [2 3 | 4 5 6 7] | 8 9 [10 11 | 12 13 14 15] | 16
    assert held == [2, 0, 2, 0, 0]  # pages of four rows
    assert eyes.encoded == [1, 1]
    rows = outputs[0].outputs[0].tensors["hidden_states"]
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)


def test_the_encoder_budget_cuts_chunks(checkpoint: str, eyes: Eyes) -> None:
    engine = build(checkpoint, max_num_encoder_tokens=7)
    pictures = [picture(0), picture(1), picture(2)]
    prompt = shows(engine, 5, *pictures, 6)
    expected = hidden_states(build(checkpoint), prompt)
    eyes.encoded.clear()
    eyes.scheduled.clear()
    torch.testing.assert_close(hidden_states(engine, prompt), expected, atol=1e-5, rtol=0)
    assert eyes.encoded == [1, 1, 1]
    assert eyes.scheduled == [7, 6, 7]


def test_placeholders_are_expanded_as_transformers_does(seeded: Callable[[str], str]) -> None:
    folder = seeded("llava")
    processor = LlavaProcessor(
        AutoImageProcessor.from_pretrained(folder, backend="pil"),
        AutoTokenizer.from_pretrained(folder),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    text = "Look: <image> and <image>."
    images = [picture(0), picture(3)]
    theirs = processor(text=text, images=images, return_tensors="pt")
    engine = build(folder)
    (output,) = engine.generate(TextPrompt(text, multi_modal_data={"image": images}), NOTHING)
    assert list(output.prompt_token_ids) == theirs["input_ids"][0].tolist()
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    chat = ChatPrompt(({"role": "user", "content": parts},), {"image": images[:1]})
    (output,) = engine.generate(chat, NOTHING)
    image_id = engine.tokenizer.convert_tokens_to_ids("<image>")  # type: ignore[union-attr]
    assert list(output.prompt_token_ids).count(image_id) == 16


def test_files_and_pillow_images_are_the_same(engine: LLMEngine, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    picture(0).save(file)
    engine.generate(shows(engine, picture(0), 7, 8, 9), NOTHING)
    ids = shows(engine, picture(0), 7, 8, 9).prompt_token_ids
    pixels = np.asarray(picture(0))
    for form in (file, str(file), pixels, torch.from_numpy(pixels.copy())):
        (output,) = engine.generate(TokensPrompt(ids, {"image": [form]}), NOTHING)
        assert output.num_cached_tokens == 8


def test_models_that_see_no_images_say_so(
    qwen2_checkpoint: str, bert_checkpoint: str, seeded: Callable[[str], str]
) -> None:
    message = "shows 1 image items in multi_modal_data, but this model takes none there"
    prompt = TokensPrompt((5, 6), {"image": [picture(0)]})
    with pytest.raises(ValueError, match=message):
        build(qwen2_checkpoint).generate(prompt, GREEDY)
    with pytest.raises(ValueError, match=message):
        EncoderEngine(EngineConfig(model=bert_checkpoint)).add_request("one", prompt)
    encoder_decoder = build(seeded("t5"))
    for form in (prompt, ExplicitEncoderDecoderPrompt("text", prompt)):
        with pytest.raises(ValueError, match=message):
            encoder_decoder.generate(form, GREEDY)
