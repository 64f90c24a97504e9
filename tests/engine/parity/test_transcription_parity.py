"""Decoders with audio towers, through the whole engine: in chats, and for transcription."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoTokenizer
from transformers.models.qwen3_asr.modeling_qwen3_asr import Qwen3ASRForConditionalGeneration
from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor
from transformers.models.voxtral.modeling_voxtral import VoxtralForConditionalGeneration

from engine import (
    AudioPrompt,
    ChatPrompt,
    EngineConfig,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TranscriptionOptions,
)
from omni.seeded.language_models import build_qwen3_asr, build_voxtral
from tests.support.encoder_decoder_reference import assert_greedy_choices
from tests.support.native_kernels import needs_kernels
from tests.support.thinker_reference import tone

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = (0.03, 0.5, 1.0, 2.13, 5.5)
LONGER_THAN_A_WINDOW = 33.0
QUESTION = "Who speaks?"
HEARD = {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": QUESTION}]}
ROLES = {"audio_token": "pad", "audio_bos_token": "start", "audio_eos_token": "end"}


class Reference(ABC):
    """A checkpoint loaded by transformers, which also makes its features and prompts.

    Attributes:
        instance: the whole model; its body is ``model``.
    """

    def __init__(self, model: Any) -> None:
        self.instance: Any = model.eval()

    @abstractmethod
    def chat(self, sound: Any) -> dict[str, Any]:
        """Return the model's inputs for a chat with a sound and a question."""

    @abstractmethod
    def transcription(self, sound: Any, language: str | None, names: str | None) -> dict[str, Any]:
        """Return the model's inputs for a transcription."""

    @torch.inference_mode()
    def check(self, output: RequestOutput, shown: dict[str, Any]) -> None:
        """Check the prompt's ids, every token and all hidden states of an answer."""
        assert output.error is None
        prompt, answer = shown.pop("input_ids"), output.outputs[0].token_ids
        assert list(output.prompt_token_ids) == prompt[0].tolist() and len(answer) == NUM_TOKENS
        ids = torch.cat([prompt, torch.tensor([answer])], dim=1)
        shown["attention_mask"] = torch.ones_like(ids)
        rows: Tensor = self.instance.model(input_ids=ids, **shown).last_hidden_state[0][:-1]
        assert_greedy_choices(self.instance.lm_head(rows[prompt.shape[1] - 1 :]), answer)
        found = output.outputs[0].tensors["hidden_states"]
        torch.testing.assert_close(found, rows, atol=1e-4, rtol=1e-5)


class Qwen3ASR(Reference):
    """Prompts of transformers' processor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            Qwen3ASRForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for role, name in ROLES.items():
            tokenizer._set_model_specific_special_tokens({role: f"<|audio_{name}|>"})
        self.processor = Qwen3ASRProcessor(
            AutoFeatureExtractor.from_pretrained(folder), tokenizer, tokenizer.chat_template
        )

    def chat(self, sound: Any) -> dict[str, Any]:
        text = self.processor.tokenizer.apply_chat_template(
            [HEARD], add_generation_prompt=True, tokenize=False
        )
        return dict(self.processor(text=[text], audio=[sound]))

    def transcription(self, sound: Any, language: str | None, names: str | None) -> dict[str, Any]:
        text = self.processor.apply_transcription_request(
            audio=[sound], language=language, prompt=names, tokenize=False
        )
        return dict(self.processor(text=text, audio=[sound]))


class Voxtral(Reference):
    """Prompts as in mistral-common 1.13, which transformers' processor requires."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            VoxtralForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        )
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.extractor = AutoFeatureExtractor.from_pretrained(folder)

    def _shown(self, sound: Any, *, said: str = "", after: str = "") -> dict[str, Any]:
        window = self.extractor.n_samples
        output = self.extractor(
            sound,
            sampling_rate=self.extractor.sampling_rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=window,
            return_tensors="pt",
        )
        (features,) = output["input_features"]
        windows = torch.stack(features.split(self.extractor.nb_max_frames, dim=1))
        rows = "[AUDIO]" * (25 * len(windows))
        text = f"{self.tokenizer.bos_token}[INST][BEGIN_AUDIO]{rows}{said}[/INST]{after}"
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "input_features": windows}

    def chat(self, sound: Any) -> dict[str, Any]:
        return self._shown(sound, said=QUESTION)

    def transcription(self, sound: Any, language: str | None, names: str | None) -> dict[str, Any]:
        code = {None: "", "en": "lang:en", "German": "lang:de"}[language]
        return self._shown(sound, after=f"{code}[TRANSCRIBE]")


@dataclass(frozen=True)
class Case:
    name: str
    folder: str
    reference: Reference


CASES: dict[str, Callable[[Path], Reference]] = {
    "qwen3_asr": lambda folder: Qwen3ASR(build_qwen3_asr(folder)),
    "qwen3_asr tied": lambda folder: Qwen3ASR(build_qwen3_asr(folder, tied=True)),
    "voxtral": lambda folder: Voxtral(build_voxtral(folder)),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tmp_path_factory.mktemp("hearing") / "model"
    reference = CASES[request.param](folder)
    return Case(request.param, str(folder), reference)


def build(folder: str, **settings: Any) -> LLMEngine:
    sized = {"num_blocks": 512, "block_size": 4, "max_num_seqs": 4}
    return LLMEngine(EngineConfig.model_validate({"model": folder} | sized | settings))


def chats(sounds: Sequence[Any]) -> list[ChatPrompt]:
    return [ChatPrompt((HEARD,), {"audio": [sound]}) for sound in sounds]


@pytest.mark.shows("parity", "hidden states", "prefix hits", "audio")
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
    for is_warm in (False, True):
        for output, sound in zip(engine.generate(chats(sounds), GREEDY), sounds, strict=True):
            case.reference.check(output, case.reference.chat(sound))
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
    options = None if names is None else TranscriptionOptions(prompt=names)
    prompt = AudioPrompt(sound, language=language, transcription=options)
    engine = build(case.folder, max_model_len=1024)
    if case.name == "voxtral" and names is not None:
        with pytest.raises(ValueError, match="no prompt beside the sound"):
            engine.generate([prompt], GREEDY)
        return
    (output,) = engine.generate([prompt], GREEDY)
    case.reference.check(output, case.reference.transcription(sound, language, names))


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
def test_unsupported_options_are_refused_and_affect_no_other_request(
    case: Case, wish: dict[str, Any], message: str
) -> None:
    engine = build(case.folder)
    engine.add_request("well", AudioPrompt(tone(0.5)), GREEDY)
    with pytest.raises(ValueError, match=message):
        engine.add_request("ill", AudioPrompt(tone(0.5), **wish), GREEDY)
    while engine.has_unfinished_requests:
        for output in engine.step():
            assert output.error is None


def test_messages_of_other_roles_are_refused_by_the_template(tmp_path: Path) -> None:
    """Otherwise a tool's result would appear as a system message."""
    engine = build(str(build_voxtral(tmp_path / "model")))
    chat = ({"role": "user", "content": "2+2?"}, {"role": "tool", "content": "4"})
    with pytest.raises(ValueError, match="no messages of the role tool"):
        engine.generate([ChatPrompt(chat)], GREEDY)


def test_a_folder_with_the_published_tokenizer_file_is_asked_in_the_same_way(
    tmp_path: Path,
) -> None:
    """It has no chat template, and names no begin and end tokens."""
    folder = build_voxtral(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    names += ["[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"audio_token_id": 5}))
    tekken = {
        "config": {
            "pattern": r"\p{L}+|\s+|[^\s\p{L}]+",
            "default_vocab_size": 256 + len(names),
            "default_num_special_tokens": len(names),
            "version": "v7",
        },
        "vocab": [
            {"rank": byte, "token_bytes": b64encode(bytes([byte])).decode(), "token_str": None}
            for byte in range(256)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(tekken))
    spoken = [len(names) + byte for byte in b"lang:en"]
    chat = [HEARD, {"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}]
    prompts = [
        AudioPrompt(tone(0.5), language="en"),
        ChatPrompt(tuple(chat), {"audio": [tone(0.5)]}),
    ]
    first, second = build(str(folder)).generate(prompts, GREEDY)
    heard = [1, 3, 6, *[5] * 25]
    assert list(first.prompt_token_ids) == [*heard, 4, *spoken, 7]
    asked = [len(names) + byte for byte in QUESTION.encode()]
    rest = [4, len(names) + ord("A"), 2, 3, len(names) + ord("B"), 4]
    assert list(second.prompt_token_ids) == [*heard, *asked, *rest]
