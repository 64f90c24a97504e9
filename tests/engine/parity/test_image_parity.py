"""Files and text in, tokens out, through the whole engine: equal to transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from engine import EngineConfig, LLMEngine, SamplingParams, TextPrompt
from engine.requests.encoder_input import PromptPositions
from tests.support.pictures import PLACEHOLDER, picture

NUM_TOKENS = 12


class Reference:
    """A checkpoint in transformers, with its image processor."""

    def __init__(self, folder: str) -> None:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def answer(self, expanded_ids: Sequence[int], images: Sequence[Image.Image]) -> list[int]:
        ids = torch.tensor([list(expanded_ids)])
        shown = dict(self.processor(images=list(images), return_tensors="pt")) if images else {}
        if images and self.model.config.model_type == "qwen2_5_vl":
            shown["mm_token_type_ids"] = (ids == self.model.config.image_token_id).long()
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                eos_token_id=None,
                **shown,
            )
        answer: list[int] = out[0, ids.shape[1] :].tolist()
        return answer


@pytest.mark.parametrize("budget", [64, 7], ids=["whole prompts", "chunks of seven"])
@pytest.mark.parametrize("name", PLACEHOLDER)
def test_mixed_requests_equal_transformers(
    name: str, budget: int, seeded: Callable[[str], str]
) -> None:
    folder, place = seeded(name), PLACEHOLDER[name]
    shown: list[list[Image.Image]] = [[picture(0), picture(3)], [], [picture(0)], [picture(2)]]
    texts = [f"See {place} and {place} now", "The harbour wakes", f"See {place}.", f"{place}What?"]
    prompts = [
        TextPrompt(text, multi_modal_data={"image": images})
        for text, images in zip(texts, shown, strict=True)
    ]
    engine = LLMEngine(
        EngineConfig(
            model=folder,
            block_size=4,
            num_blocks=128,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
        )
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    reference = Reference(folder)
    cold, warm = engine.generate(prompts, greedy), engine.generate(prompts, greedy)
    for images, first, again in zip(shown, cold, warm, strict=True):
        assert again.prompt_token_ids == first.prompt_token_ids
        expected = reference.answer(first.prompt_token_ids, images)
        for output in (first, again):
            assert list(output.outputs[0].token_ids) == expected
    encoder = engine.stats().encoder_cache
    assert encoder is not None and encoder.encoded == 3


def test_generated_tokens_follow_the_largest_place_on_every_axis() -> None:
    # a, b, an image of 2 x 3, c
    table = torch.tensor(
        [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    )
    places = PromptPositions.of(table)
    assert torch.equal(places.cut(0, 9), table)
    assert torch.equal(places.cut(3, 6), table[:, 3:6])
    assert places.cut(8, 11).tolist() == [[5, 6, 7]] * 3
    assert places.cut(20, 21).tolist() == [[17]] * 3
