"""Several models in one checkpoint: each is opened, and read, by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from engine import ChatPrompt, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from engine.checkpoints import weight_files
from engine.generator.generator_engine import GeneratorEngine
from engine.interface.config import GeneratorConfig
from engine.models.model_loader import open_checkpoint
from engine.text.tokenizer import eos_token_ids, load_tokenizer
from tests.support.published_layout import publish

PREFIXES = {"thinker": "thinker.", "talker": "talker.", "code2wav": "token2wav."}
EMBEDDING = "thinker.model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folder(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_omni")


class _CountingFile:
    """A safetensors file that notes what is read of it."""

    def __init__(self, file: Any, read: Counter[str], rows: Counter[str]) -> None:
        self._file, self._read, self._rows = file, read, rows

    def __enter__(self) -> _CountingFile:
        self._opened = self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def keys(self) -> Any:
        return self._opened.keys()

    def get_tensor(self, name: str) -> Any:
        self._read[name] += 1
        return self._opened.get_tensor(name)

    def get_slice(self, name: str) -> Any:
        rows, matrix = self._rows, self._opened.get_slice(name)

        class Slice:
            def get_shape(self) -> Any:
                return matrix.get_shape()

            def get_dtype(self) -> Any:
                return matrix.get_dtype()

            def __getitem__(self, key: slice) -> Any:
                rows[name] += key.stop - key.start
                return matrix[key]

        return Slice()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """How often each tensor was read whole, and how many single rows of each."""
    whole: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    monkeypatch.setattr(
        weight_files,
        "safe_open",
        lambda path, **how: _CountingFile(safe_open(path, **how), whole, rows),
    )
    yield whole, rows


def test_the_parts_share_out_all_weights(folder: str):
    stored = load_file(Path(folder) / "model.safetensors")
    named = [
        prefix + name
        for part, prefix in PREFIXES.items()
        for name in open_checkpoint(folder, part=part).weight_files
    ]
    assert sorted(named) == sorted(stored)


def test_a_parts_weights_go_by_their_names_in_it(folder: str):
    stored = load_file(Path(folder) / "model.safetensors")
    for name, tensor in open_checkpoint(folder, part="talker").weights():
        assert torch.equal(tensor, stored[f"talker.{name}"])


def test_a_part_has_its_own_config(folder: str):
    talker = open_checkpoint(folder, part="talker")
    assert talker.config.model_type == "qwen2_5_omni_talker"
    assert talker.architecture == "Qwen2_5OmniTalkerForConditionalGeneration"
    # The file's stop tokens are the thinker's.
    assert talker.generation_config is None
    assert open_checkpoint(folder, part="thinker").generation_config is not None


@pytest.mark.parametrize("part", ["thinker", "talker"])
def test_an_engine_reads_its_own_part_once_and_no_other(
    folder: str, part: str, reads: tuple[Counter[str], Counter[str]]
):
    whole, rows = reads
    LLMEngine(EngineConfig(model=folder, part=part, device="cpu", num_blocks=8, max_model_len=64))
    stored = load_file(Path(folder) / "model.safetensors")
    assert whole == Counter(name for name in stored if name.startswith(PREFIXES[part]))
    # A talker speaks of the text's begin (one per voice), end and padding in the thinker's terms.
    assert rows == (Counter({EMBEDDING: 4}) if part == "talker" else Counter())


def test_the_vocoder_reads_its_own_part_once_and_no_other(
    folder: str, reads: tuple[Counter[str], Counter[str]]
):
    whole, rows = reads
    GeneratorEngine(GeneratorConfig(model=folder, part="code2wav", device="cpu"))
    stored = load_file(Path(folder) / "model.safetensors")
    assert whole == Counter(name for name in stored if name.startswith("token2wav."))
    assert not rows


def test_single_rows_of_another_part_can_be_read(folder: str):
    stored = load_file(Path(folder) / "model.safetensors")[EMBEDDING]
    rows = open_checkpoint(folder, part="talker").rows_of_whole(EMBEDDING, [5, 2])
    assert torch.equal(rows, stored[[5, 2]])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (None, "holds several models; say by part which: thinker, talker, code2wav"),
        ("talkr", "no part 'talkr'.*did you mean 'talker'"),
    ],
)
def test_what_is_asked_for_must_be_there(folder: str, part: str | None, message: str):
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder, part=part)


def test_a_vocoder_is_no_language_model(folder: str):
    with pytest.raises(ValueError, match="unsupported architecture 'Qwen2_5OmniToken2WavModel'"):
        LLMEngine(EngineConfig(model=folder, part="code2wav"))


def test_one_model_has_no_parts(qwen2_checkpoint: str):
    with pytest.raises(ValueError, match="one model without parts"):
        open_checkpoint(qwen2_checkpoint, part="thinker")


@pytest.mark.parametrize(("name", "index"), [("thinker.nothing", 0), (EMBEDDING, 768)])
def test_rows_that_are_not_there_are_refused(folder: str, name: str, index: int):
    with pytest.raises(ValueError, match=r"lacks the weights|in .* has rows 0 to 767"):
        open_checkpoint(folder, part="talker").rows_of_whole(name, [index])


MODELS = [("llava", None), ("qwen2_5_vl", None), ("qwen2_5_omni", "thinker")]
MESSAGE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]}


def answer(folder: str | Path, part: str | None) -> RequestOutput:
    chat = ChatPrompt((MESSAGE,), {"image": [Image.new("RGB", (60, 40), "teal")]})
    config = EngineConfig(model=str(folder), part=part, num_blocks=64, max_model_len=256)
    engine = LLMEngine(config)
    try:
        (output,) = engine.generate([chat], SamplingParams(max_tokens=16, ignore_eos=True))
    finally:
        engine.close()
    return output


@pytest.mark.parametrize(("name", "part"), MODELS)
def test_the_published_layout_changes_no_token(
    name: str, part: str | None, seeded: Callable[[str], str], tmp_path: Path
):
    folder = seeded(name)
    here, there = answer(folder, part), answer(publish(folder, tmp_path / "model"), part)
    assert here.prompt_token_ids == there.prompt_token_ids, "the chat template is the processor's"
    assert here.outputs[0].token_ids == there.outputs[0].token_ids


@pytest.mark.parametrize(("name", "part"), MODELS)
def test_the_published_layout_ends_replies_by_the_same_tokens(
    name: str, part: str | None, seeded: Callable[[str], str], tmp_path: Path
):
    folder = seeded(name)
    found = []
    for each in (folder, publish(folder, tmp_path / "model")):
        checkpoint = open_checkpoint(each, part=part)
        tokenizer = load_tokenizer(each)
        found.append(eos_token_ids(checkpoint.config, checkpoint.generation_config, tokenizer))
    assert found[0] == found[1] != frozenset()
