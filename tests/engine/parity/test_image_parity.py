"""Files and text in, tokens and rows out, through the whole engine: equal to transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from engine import EngineConfig, LLMEngine, SamplingParams, TextPrompt
from omni.seeded.multimodal import build_llava, build_qwen2_5_vl
from tests.support.encoder_decoder_reference import assert_greedy_choices
from tests.support.native_kernels import needs_kernels
from tests.support.pictures import PLACEHOLDER, picture

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
}


class Reference:
    """A checkpoint in transformers, with its image processor."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    @torch.inference_mode()
    def rows_and_logits(
        self, prompt: Sequence[int], answer: Sequence[int], images: Sequence[Image.Image]
    ) -> tuple[Tensor, Tensor]:
        """Of the prompt, its placeholders expanded, and of the answer, in one pass.

        Not by ``generate``, which counts each axis on from the last token after an image.
        """
        ids = torch.tensor([[*prompt, *answer]])
        shown = dict(self.processor(images=list(images), return_tensors="pt")) if images else {}
        if self.model.config.model_type == "qwen2_5_vl":
            # What earlier calls left behind would be taken for this one's.
            self.model.model.rope_deltas = None
            is_image = ids == self.model.config.image_token_id
            # A generated token of that id is no image.
            is_image[:, len(prompt) :] = False
            shown["mm_token_type_ids"] = is_image.long()
        output = self.model.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **shown
        )
        rows: Tensor = output.last_hidden_state[0]
        return rows, self.model.lm_head(rows)


@pytest.mark.parametrize(
    ("budget", "backend"), [(64, "torch"), pytest.param(7, "native", marks=needs_kernels)]
)
@pytest.mark.parametrize("name", BUILDERS)
def test_mixed_requests_equal_transformers(
    name: str, budget: int, backend: str, tmp_path: Path
) -> None:
    """Chunks of seven end inside images; pages hold NaN until they are written."""
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
                "block_size": 4,
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
