"""Qwen3-ASR through the whole engine: asked in a chat, or by a sound alone, as transformers is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoTokenizer
from transformers.models.qwen3_asr.modeling_qwen3_asr import Qwen3ASRForConditionalGeneration
from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

from engine import (
    AudioPrompt,
    ChatPrompt,
    EngineConfig,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TranscriptionOptions,
)
from omni.seeded.language_models import build_qwen3_asr
from tests.support.encoder_decoder_reference import assert_greedy_choices
from tests.support.native_kernels import needs_kernels
from tests.support.thinker_reference import tone

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = (0.03, 0.5, 1.0, 2.13, 5.5)
LONGER_THAN_A_WINDOW = 33.0
HEARD = {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "Who speaks?"}]}
ROLES = {"audio_token": "pad", "audio_bos_token": "start", "audio_eos_token": "end"}


class Reference:
    """A checkpoint in transformers, with its processor."""

    def __init__(self, folder: str | Path) -> None:
        model = Qwen3ASRForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.model: Any = model.eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for role, name in ROLES.items():
            tokenizer._set_model_specific_special_tokens({role: f"<|audio_{name}|>"})
        self.processor = Qwen3ASRProcessor(
            AutoFeatureExtractor.from_pretrained(folder), tokenizer, tokenizer.chat_template
        )

    @torch.inference_mode()
    def check(self, output: RequestOutput, text: str, sound: Any) -> None:
        """Check the prompt's ids, every token and all hidden states of an answer."""
        assert output.error is None
        shown = dict(self.processor(text=[text], audio=[sound]))
        prompt, answer = shown.pop("input_ids"), output.outputs[0].token_ids
        assert list(output.prompt_token_ids) == prompt[0].tolist() and len(answer) == NUM_TOKENS
        ids = torch.cat([prompt, torch.tensor([answer])], dim=1)
        shown["attention_mask"] = torch.ones_like(ids)
        rows: Tensor = self.model.model(input_ids=ids, **shown).last_hidden_state[0][:-1]
        assert_greedy_choices(self.model.lm_head(rows[prompt.shape[1] - 1 :]), answer)
        found = output.outputs[0].tensors["hidden_states"]
        torch.testing.assert_close(found, rows, atol=1e-4, rtol=1e-5)


@dataclass(frozen=True)
class Case:
    folder: str
    reference: Reference


@pytest.fixture(scope="module", params=["qwen3_asr", "qwen3_asr tied"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    tied = request.param.endswith("tied")
    folder = build_qwen3_asr(tmp_path_factory.mktemp("asr") / "model", tied=tied)
    return Case(str(folder), Reference(folder))


def build(folder: str, **settings: Any) -> LLMEngine:
    sized = {"num_blocks": 512, "block_size": 4, "max_num_seqs": 4}
    return LLMEngine(EngineConfig.model_validate({"model": folder} | sized | settings))


def chats(sounds: Sequence[Any]) -> list[ChatPrompt]:
    return [ChatPrompt((HEARD,), {"audio": [sound]}) for sound in sounds]


@pytest.mark.shows("parity", "hidden states", "prefix hits", "audio", of="qwen3_asr")
@pytest.mark.parametrize(
    ("block_size", "budget", "backend"),
    [(4, 8, "torch"), (16, 512, "torch"), pytest.param(4, 64, "native", marks=needs_kernels)],
)
def test_sounds_in_chats_equal_transformers_cold_and_warm(
    case: Case, block_size: int, budget: int, backend: str
) -> None:
    engine = build(
        case.folder,
        block_size=block_size,
        max_num_batched_tokens=budget,
        attention_backend=backend,
    )
    sounds = [tone(seconds) for seconds in LENGTHS]
    text = case.reference.processor.tokenizer.apply_chat_template(
        [HEARD], add_generation_prompt=True, tokenize=False
    )
    for is_warm in (False, True):
        for output, sound in zip(engine.generate(chats(sounds), GREEDY), sounds, strict=True):
            case.reference.check(output, text, sound)
            if is_warm:
                last = len(output.prompt_token_ids) - 1
                assert output.num_cached_tokens == last // block_size * block_size
    stats = engine.stats().kv
    assert stats is not None and stats.items is not None and stats.items.held == 0


@pytest.mark.parametrize("language", [None, "en", "German"])
@pytest.mark.parametrize("names", [None, "Ada Lovelace, Köln"])
def test_a_sound_alone_asks_as_the_processor_of_transformers_does(
    case: Case, language: str | None, names: str | None
) -> None:
    sound = tone(LONGER_THAN_A_WINDOW)
    text = case.reference.processor.apply_transcription_request(
        audio=[sound], language=language, prompt=names, tokenize=False
    )
    options = None if names is None else TranscriptionOptions(prompt=names)
    prompt = AudioPrompt(sound, language=language, transcription=options)
    (output,) = build(case.folder, max_model_len=1024).generate([prompt], GREEDY)
    case.reference.check(output, text[0], sound)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"language": "Klingon"}, "(?i)klingon"),
        ({"task": "translate"}, "task is for speech models"),
        ({"timestamps": True}, "timestamps is for speech models"),
        ({"transcription": TranscriptionOptions(temperature=(0.0, 0.5))}, "temperature is for"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused_and_harms_no_other(
    case: Case, wish: dict[str, Any], message: str
) -> None:
    engine = build(case.folder)
    engine.add_request("well", AudioPrompt(tone(0.5)), GREEDY)
    with pytest.raises(ValueError, match=message):
        engine.add_request("ill", AudioPrompt(tone(0.5), **wish), GREEDY)
    while engine.has_unfinished_requests:
        for output in engine.step():
            assert output.error is None
