"""Damaged checkpoints are refused by file and key, and code of a checkpoint never runs untrusted.

A sample of what ``torture/hostile_checkpoints.py`` and ``torture/config_fuzz.py`` try in separate
processes.
"""

from __future__ import annotations

import ast
import builtins
import json
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
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
from engine.models.model_loader import open_checkpoint
from tests.support.config_changes import config_changes
from tests.support.encoder_decoder_requests import tone
from tests.support.hostile_checkpoints import Hostile, hostile_checkpoints
from tests.support.import_graph import modules
from tests.support.model_trial import TRIALS

CASES = list(hostile_checkpoints())
# Each kind of damage once, in alternating families; all voices of the vocoder.
WAYS: dict[str, list[Hostile]] = {}
for case in CASES:
    WAYS.setdefault(case.what, []).append(case)
CHOSEN = [ways[number % len(ways)] for number, ways in enumerate(WAYS.values())]


def test_cases_are_many_and_distinct():
    assert len(CASES) > 600
    assert len({(case.family, case.what) for case in CASES}) == len(CASES)
    assert {case.family for case in CASES} == set(TRIALS)


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: f"{case.family}: {case.what}")
def test_a_damaged_checkpoint_is_refused_by_name_or_runs(
    case: Hostile, seeded: Callable[[str], str], tmp_path: Path
):
    trial, folder = TRIALS[case.family], tmp_path / "checkpoint"
    shutil.copytree(seeded(trial.seeded), folder)
    case.spoil(folder)
    try:
        message = trial.run(folder)
    except ValueError as error:
        message = str(error)
        assert str(folder) in message
    assert not case.names or message is not None, "it loaded and answered"
    assert [name for name in case.names if name not in (message or "")] == [], message


# Parts that share a config are tried once.
WHOLE = [name for name in TRIALS if not name.endswith(("talker", "code2wav"))]


@pytest.mark.parametrize("family", WHOLE)
def test_a_changed_config_opens_or_is_refused_by_name(
    family: str, seeded: Callable[[str], str], tmp_path: Path
):
    trial, folder = TRIALS[family], tmp_path / "checkpoint"
    shutil.copytree(seeded(trial.seeded), folder)
    changes = list(config_changes(json.loads((folder / "config.json").read_text())))
    refused = 0
    for change in random.Random(0).sample(changes, 5 if trial.part else 16):
        (folder / "config.json").write_text(change.text)
        try:
            open_checkpoint(folder, part=trial.part)
        except ValueError as error:
            assert str(folder) in str(error), change.what
            refused += 1
    assert refused


KEYS: list[tuple[str, str, Any]] = [
    ("qwen2", "hidden_size", 0),
    ("qwen2", "hidden_size", -64),
    ("qwen2", "num_attention_heads", 0),
    ("qwen2", "vocab_size", 10**18),
    ("qwen2", "rms_norm_eps", -1.0),
    ("qwen2", "hidden_act", "evil"),
    ("qwen2", "num_hidden_layers", 10**9),
    ("gemma2", "query_pre_attn_scalar", 0),
    ("gemma2", "final_logit_softcapping", -1.0),
    ("mistral-sliding", "sliding_window", 0),
    ("jamba", "mamba_d_conv", -3),
    ("jamba", "mamba_d_state", 0),
    ("t5", "relative_attention_num_buckets", 0),
    ("whisper", "max_source_positions", 0),
    ("bert", "num_attention_heads", 0),
]


@pytest.mark.parametrize(("name", "key", "value"), KEYS)
def test_impossible_values_are_refused_by_their_keys(
    name: str, key: str, value: Any, seeded: Callable[[str], str], tmp_path: Path
):
    folder = tmp_path / "checkpoint"
    shutil.copytree(seeded(name), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=rf"checkpoint/config\.json.*\b{key}\b") as raised:
        open_checkpoint(folder)
    assert str(value) in str(raised.value)


def test_the_section_of_a_config_is_named(seeded: Callable[[str], str], tmp_path: Path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(seeded("llava"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["patch_size"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"vision_config\.patch_size must be an integer of 1 to"):
        open_checkpoint(folder)


SHOWS = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]}
IMAGE = Image.new("RGB", (60, 40), "teal")
# Each with a prompt that needs its processor.
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
    """Checkpoint with code; knows whether the code ran or a question was asked."""

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
    with closing(LLMEngine(config)) as engine:
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True))
    return output.error


@pytest.mark.parametrize("name", MODELS)
def test_code_of_a_known_model_is_not_run(name: str, visit: Callable[..., Visit]):
    part, prompt = MODELS[name]
    visited = visit(name)
    assert answer(visited.folder, part, prompt) is None
    visited.assert_nothing_happened()


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_that_needs_its_code_is_refused(name: str, visit: Callable[..., Visit]):
    part, prompt = MODELS[name]
    visited = visit(name, changes=dict.fromkeys(TYPES, "Evil"))
    try:
        error = answer(visited.folder, part, prompt)
    except ValueError as raised:
        error = str(raised)
    # If the processor or tokenizer of the model is known, it is used instead.
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
def test_an_unknown_processor_is_refused_without_a_question(
    name: str, key: str, load: Callable[[Path], object], visit: Callable[..., Visit]
):
    """Published code has its own class for a model that transformers does not know."""
    visited = visit(name, changes={key: "Evil", "model_type": "evil"})
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(visited.folder)
    visited.assert_nothing_happened()


def untrusted_loads(source: str) -> list[str]:
    """Loads by transformers' Auto classes without ``trust_remote_code``."""
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
def test_every_load_states_whether_code_may_run(package: str):
    """Otherwise transformers asks on the terminal."""
    found = {str(file): untrusted_loads(file.read_text("utf-8")) for file in modules(package)}
    assert {file: calls for file, calls in found.items() if calls} == {}


def test_a_load_that_does_not_state_it_is_found():
    load = "AutoProcessor.from_pretrained"
    assert untrusted_loads(f"{load}(path, local_files_only=True)") == [load]
    assert untrusted_loads(f"{load}(path, trust_remote_code=False)") == []


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
