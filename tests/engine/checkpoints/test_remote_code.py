"""A checkpoint's own code never runs unless it is trusted, and nobody is asked."""

from __future__ import annotations

import ast
import builtins
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine import (
    AudioPrompt,
    ChatPrompt,
    EncoderEngine,
    EngineConfig,
    ImagePrompt,
    LLMEngine,
    Prompt,
    SamplingParams,
)
from engine.media.image_file import load_image_processor
from engine.media.sound_file import load_extractor
from tests.support.encoder_decoder_requests import tone
from tests.support.import_graph import modules

SHOWS = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]}
IMAGE = Image.new("RGB", (60, 40), "teal")
# With a prompt that needs the processor.
MODELS: dict[str, tuple[str | None, Prompt]] = {
    "qwen2": (None, "the quick brown fox"),
    "bart": (None, "the quick brown fox"),
    "llava": (None, ChatPrompt((SHOWS,), {"image": [IMAGE]})),
    "qwen2_5_vl": (None, ChatPrompt((SHOWS,), {"image": [IMAGE]})),
    "qwen2_5_omni": ("thinker", ChatPrompt((SHOWS,), {"image": [IMAGE]})),
    "mllama": (None, ImagePrompt(IMAGE)),
    "whisper": (None, AudioPrompt(tone(0.5), language="en")),
}
AUTO_CLASSES = (
    *("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer"),
    *("AutoImageProcessor", "AutoFeatureExtractor", "AutoProcessor", "AutoVideoProcessor"),
)
FILES = (
    *("config.json", "tokenizer_config.json", "preprocessor_config.json"),
    *("processor_config.json", "generation_config.json"),
)
TYPES = (
    *("image_processor_type", "feature_extractor_type", "tokenizer_class", "processor_class"),
    "video_processor_type",
)
EVIL = """
import pathlib
pathlib.Path(__file__).parent.joinpath("RAN").touch()
pathlib.Path({marker!r}).touch()
class Evil:
    pass
"""


class Visit:
    """A checkpoint that brings code, and whether it ran or anybody was asked."""

    def __init__(self, folder: Path, marker: Path, asked: list[str]) -> None:
        self.folder, self.marker, self.asked = folder, marker, asked

    def assert_nothing_happened(self) -> None:
        assert self.asked == []
        assert not self.marker.exists() and not (self.folder / "RAN").exists()
        assert not [name for name in sys.modules if name.endswith(".evil")]


@pytest.fixture
def visit(
    seeded: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Visit]:
    asked: list[str] = []

    def ask(question: str = "") -> str:
        asked.append(question)
        return "y"

    def make(name: str, *, changes: dict[str, Any] | None = None) -> Visit:
        monkeypatch.setattr(builtins, "input", ask)
        folder, marker = tmp_path / "checkpoint", tmp_path / "marker"
        shutil.copytree(seeded(name), folder)
        (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
        auto_map: dict[str, Any] = dict.fromkeys(AUTO_CLASSES, "evil.Evil")
        for file in FILES:
            path = folder / file
            content = json.loads(path.read_text()) if path.exists() else {}
            tokens = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]} if "tokenizer" in file else {}
            content |= {"auto_map": auto_map | tokens}
            content |= {key: value for key, value in (changes or {}).items() if key in content}
            path.write_text(json.dumps(content))
        return Visit(folder, marker, asked)

    return make


def answer(folder: Path, part: str | None, prompt: Prompt) -> str | None:
    config = EngineConfig(model=str(folder), part=part, num_blocks=64, max_model_len=128)
    engine = LLMEngine(config)
    try:
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True))
    finally:
        engine.close()
    return output.error


@pytest.mark.parametrize("name", MODELS)
def test_code_beside_what_transformers_knows_is_left_alone(name: str, visit: Callable[..., Visit]):
    part, prompt = MODELS[name]
    visited = visit(name)
    assert answer(visited.folder, part, prompt) is None
    visited.assert_nothing_happened()


@pytest.mark.parametrize("name", MODELS)
def test_what_cannot_do_without_its_code_is_refused(name: str, visit: Callable[..., Visit]):
    part, prompt = MODELS[name]
    visited = visit(name, changes=dict.fromkeys(TYPES, "Evil"))
    try:
        error = answer(visited.folder, part, prompt)
    except ValueError as raised:
        error = str(raised)
    # Where it is known what the model's processor or tokenizer is, that one is taken.
    assert error is None or "cannot be loaded" in error
    visited.assert_nothing_happened()


def test_an_encoder_runs_no_code(visit: Callable[..., Visit]):
    visited = visit("bert")
    EncoderEngine(EngineConfig(model=str(visited.folder), num_blocks=8, max_model_len=16)).close()
    visited.assert_nothing_happened()


def test_a_config_that_needs_code_is_refused(visit: Callable[..., Visit]):
    visited = visit("qwen2", changes={"model_type": "evil"})
    with pytest.raises(ValueError, match=r"config.json cannot be used: .*custom code"):
        answer(visited.folder, None, "x")
    visited.assert_nothing_happened()


@pytest.mark.parametrize(
    ("name", "key", "load"),
    [
        ("llava", "image_processor_type", load_image_processor),
        ("whisper", "feature_extractor_type", load_extractor),
    ],
)
def test_a_processor_of_an_unknown_kind_is_refused_without_a_question(
    name: str, key: str, load: Callable[[Path], object], visit: Callable[..., Visit]
):
    """As published code does it: a class of its own, on a model that transformers does not know."""
    visited = visit(name, changes={key: "Evil", "model_type": "evil"})
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(visited.folder)
    visited.assert_nothing_happened()


def untold(source: str) -> list[str]:
    """Loads by transformers' Auto classes that do not say whether code may run."""
    return [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(node.func.value).startswith("Auto")
        and "trust_remote_code" not in {keyword.arg for keyword in node.keywords}
    ]


@pytest.mark.parametrize("package", ["engine", "stages"])
def test_every_load_says_whether_code_may_run(package: str):
    """Where it is not said, transformers asks."""
    found = {str(file): untold(file.read_text("utf-8")) for file in modules(package)}
    assert {file: calls for file, calls in found.items() if calls} == {}


def test_a_load_that_does_not_say_so_is_found():
    assert untold("AutoProcessor.from_pretrained(path, local_files_only=True)") == [
        "AutoProcessor.from_pretrained"
    ]
    assert untold("AutoProcessor.from_pretrained(path, trust_remote_code=False)") == []


def test_code_of_the_hub_for_attention_is_not_fetched(seeded: Callable[[str], str], tmp_path: Path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(seeded("llava"), folder)
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config["text_config"], config["vision_config"]):
        part |= {"attn_implementation": "evil/kernel", "_attn_implementation": "evil/kernel"}
        part |= {"experts_implementation": "evil/kernel"}
        part |= {"_attn_implementation_internal": "evil/kernel"}
    (folder / "config.json").write_text(json.dumps(config))
    assert answer(folder, None, MODELS["llava"][1]) is None
