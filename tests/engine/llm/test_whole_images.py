"""Images with bidirectional attention: they run in one step, and hits may end inside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Processor,
)

from engine import (
    ChatPrompt,
    EngineConfig,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from engine.scheduling.scheduler import Scheduler, SchedulerOutput
from tests.support.encoder_decoder_reference import assert_greedy_choices
from tests.support.idle_engine import finish
from tests.support.pictures import picture

ROWS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PARTS = [{"type": "text", "text": "Here:\n"}, {"type": "image"}, {"type": "text", "text": "\n."}]
SHOWS = ({"role": "user", "content": PARTS},)


def build(folder: str, **changed: Any) -> LLMEngine:
    usual = {"block_size": 4, "num_blocks": 2048, "max_num_seqs": 6, "max_model_len": 200}
    return LLMEngine(EngineConfig.model_validate({"model": folder, **usual, **changed}))


class Reference:
    """A checkpoint loaded by transformers."""

    def __init__(self, folder: str) -> None:
        loaded: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model = loaded.eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        names = {"boi": "<start_of_image>", "image": "<image_soft_token>", "eoi": "<end_of_image>"}
        for name, token in names.items():
            setattr(tokenizer, f"{name}_token", token)
            setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        images: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.tokenizer, self.images = tokenizer, images
        self.processor = Gemma3Processor(images, tokenizer, image_seq_length=ROWS)

    @torch.inference_mode()
    def check(self, output: RequestOutput, images: list[Any]) -> None:
        """Check the hidden states and greedy choices of an answer."""
        ids, answer = output.prompt_token_ids, output.outputs[0].token_ids
        row = torch.tensor([[*ids, *answer[:-1]]])
        theirs = self.model.model(
            input_ids=row,
            attention_mask=torch.ones_like(row),
            token_type_ids=(row == self.model.config.image_token_id).long(),
            use_cache=False,
            **self.images(images=images, return_tensors="pt"),
        )
        rows = theirs.last_hidden_state[0]
        made = output.outputs[0].tensors["hidden_states"]
        torch.testing.assert_close(made, rows, atol=1e-4, rtol=0)
        assert_greedy_choices(self.model.lm_head(rows[len(ids) - 1 :]), answer)


@pytest.fixture(scope="module")
def folder(seeded: Callable[[str], str]) -> str:
    return seeded("gemma3_vision")


@pytest.fixture(scope="module")
def reference(folder: str) -> Reference:
    return Reference(folder)


def test_prompts_and_answers_are_those_of_transformers(folder: str, reference: Reference) -> None:
    """Line breaks around an image merge with those of the text before it."""
    engine = build(folder)
    text = engine.tokenizer.apply_chat_template(  # type: ignore[union-attr]
        list(SHOWS), tokenize=False, add_generation_prompt=True
    )
    theirs = reference.processor(
        text=text, images=[picture(0)], return_tensors="pt", add_special_tokens=False
    )
    (output,) = engine.generate(ChatPrompt(SHOWS, {"image": [picture(0)]}), GREEDY)
    assert list(output.prompt_token_ids) == theirs["input_ids"][0].tolist()
    answer = reference.model.generate(
        **theirs, do_sample=False, max_new_tokens=8, eos_token_id=None
    )
    assert [*output.prompt_token_ids, *output.outputs[0].token_ids] == answer[0].tolist()
    bare = TextPrompt("See <start_of_image>", multi_modal_data={"image": [picture(1)]})
    (output,) = engine.generate(bare, GREEDY)
    theirs = reference.processor(text=bare.prompt, images=[picture(1)])
    assert list(output.prompt_token_ids) == theirs["input_ids"][0]


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Scheduled chunks of several tokens: request id, begin, end."""
    seen: list[tuple[str, int, int]] = []
    schedule = Scheduler.schedule

    def noted(self: Scheduler) -> SchedulerOutput:
        output = schedule(self)
        for item in output.scheduled:
            first = item.request.num_computed_tokens
            if item.num_tokens > 1:
                seen.append((item.request.request_id, first, first + item.num_tokens))
        return output

    monkeypatch.setattr(Scheduler, "schedule", noted)
    return seen


@pytest.mark.parametrize(
    ("budget", "block_size"), [(16, 4), (21, 16), (40, 4), (64, 16), (512, 4)], ids=str
)
def test_no_chunk_ends_inside_an_image(
    budget: int,
    block_size: int,
    folder: str,
    reference: Reference,
    chunks: list[tuple[str, int, int]],
) -> None:
    """Other requests decode at once, and leave less than an image of the smallest budget."""
    engine = build(folder, max_num_batched_tokens=budget, block_size=block_size)
    image_id = reference.model.config.image_token_id
    shown = {"two": [picture(0), picture(3)], "one": [picture(1)], "another": [picture(2)]}
    for name in ("a", *shown, "b"):
        images = shown.get(name, [])
        ids = [5, 6, *(n for number in range(len(images)) for n in (image_id, 20 + number)), 9]
        engine.add_request(name, TokensPrompt(tuple(ids), {"image": images}), GREEDY)
    outputs = finish(engine)
    for name, images in shown.items():
        reference.check(outputs[name], images)
        is_image = [token == image_id for token in outputs[name].prompt_token_ids]
        ends = [end for whose, _, end in chunks if whose == name and end < len(is_image)]
        assert not any(is_image[end - 1] and is_image[end] for end in ends)


def test_an_image_may_take_the_tokens_of_those_that_decode_behind_it(
    folder: str, reference: Reference
) -> None:
    engine = build(folder, max_num_batched_tokens=ROWS)
    image_id = reference.model.config.image_token_id
    engine.add_request("image", TokensPrompt((5, image_id, 6), {"image": [picture(0)]}), GREEDY)
    engine.add_request("long", TokensPrompt((5, 6, 7)), LONG)
    assert list(finish(engine)) == ["image", "long"]


def test_an_image_longer_than_a_step_is_refused_with_the_fix(folder: str) -> None:
    engine = build(folder, max_num_batched_tokens=15)
    prompt = TextPrompt("See <start_of_image>", multi_modal_data={"image": [picture(0)]})
    with pytest.raises(ValueError, match=r"its 16 tokens .* is 15; raise it to 16 or more"):
        engine.generate(prompt, GREEDY)


def test_a_hit_may_end_inside_an_image(
    folder: str, reference: Reference, chunks: list[tuple[str, int, int]]
) -> None:
    engine = build(folder)
    image_id = reference.model.config.image_token_id
    prompt = TokensPrompt((5, 6, 7, image_id), {"image": [picture(0)]})
    (output,) = engine.generate(prompt, GREEDY)
    chunks.clear()
    (again,) = engine.generate(prompt, GREEDY)
    assert again.num_cached_tokens == 16 and [chunk[1:] for chunk in chunks] == [(16, 19)]
    reference.check(again, [picture(0)])
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    (other,) = engine.generate(TokensPrompt((5, 6, 7, image_id), {"image": [picture(1)]}), GREEDY)
    assert other.num_cached_tokens == 0, "its first block holds a token of another image"


def test_a_processor_that_cuts_images_is_refused(folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "cuts")
    file = tmp_path / "cuts" / "preprocessor_config.json"
    stated = json.loads(file.read_text()) | {"do_pan_and_scan": True}
    file.write_text(json.dumps(stated))
    with pytest.raises(ValueError, match="do_pan_and_scan, which cuts images .* set it to false"):
        build(str(tmp_path / "cuts"))
