"""Reading checkpoints of one model or of several parts, and the errors for invalid ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

from engine import (
    ChatPrompt,
    EncoderEngine,
    EngineConfig,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)
from engine.checkpoints import checkpoint, weight_files
from engine.checkpoints.checkpoint import ENTRY_POINTS, Checkpoint, folder_of_source
from engine.checkpoints.config_file import activation_of, check_activation, hidden_progress_bars
from engine.checkpoints.weight_files import WeightFiles
from engine.generator.generator_engine import GeneratorEngine
from engine.interface.config import GeneratorConfig
from engine.models.model_loader import open_checkpoint
from engine.text.tokenizer import eos_token_ids, load_tokenizer
from omni import AutoregressiveStage, Omni, Pipeline
from omni.seeded.language_models import build_causal_lm
from tests.support.published_layout import publish

NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_causal_lm(tmp_path / "single", with_tokenizer=False)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    whole = build_causal_lm(tmp_path / "whole", with_tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


def stored(folder: str | Path) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def empty_weights(folder: Path) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in stored(folder).items()}


def test_single_file_and_shards_hold_the_same(folder: Path, sharded: Path):
    expected = stored(folder)
    for path in (folder, sharded):
        weights = dict(Checkpoint.open(path).weights())
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_only_the_wanted_names_are_read(sharded: Path):
    checkpoint = Checkpoint.open(sharded)
    shard = sharded / checkpoint.weight_files[NORM]
    for other in sharded.glob("*.safetensors"):
        if other != shard:
            other.write_bytes(b"not to be opened")
    assert [name for name, _ in checkpoint.weights([NORM])] == [NORM]


def test_load_into_converts_the_dtype(folder: Path):
    targets = {name: tensor.bfloat16() for name, tensor in empty_weights(folder).items()}
    Checkpoint.open(folder).load_into(targets)
    assert all(torch.equal(targets[name], t.bfloat16()) for name, t in stored(folder).items())


def test_a_config_is_parsed_again_after_its_file_or_class_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    class Other(PreTrainedConfig):
        model_type = "qwen2"

    file = folder / "config.json"
    content = json.loads(file.read_text())
    first, second = Checkpoint.open(folder).config, Checkpoint.open(folder).config
    first.hidden_size += 1
    assert second.hidden_size == content["hidden_size"], "each has its own"
    file.write_text(json.dumps(content | {"hidden_size": 2 * content["hidden_size"]}))
    assert Checkpoint.open(folder).config.hidden_size == 2 * content["hidden_size"]
    file.write_text(json.dumps(content))
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "qwen2", Other)
    assert type(Checkpoint.open(folder).config) is Other


def test_generation_config_is_optional(folder: Path):
    generation_config = Checkpoint.open(folder).generation_config
    assert generation_config is not None
    assert generation_config.eos_token_id == Checkpoint.open(folder).config.eos_token_id
    (folder / "generation_config.json").unlink()
    assert Checkpoint.open(folder).generation_config is None


def test_missing_weights_are_listed(folder: Path):
    weights = stored(folder)
    removed = [name for name in weights if "layers.1" in name]
    save_file({k: v for k, v in weights.items() if k not in removed}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks the weights .*and \d more") as raised:
        Checkpoint.open(folder).load_into(dict.fromkeys(weights, torch.empty(0)))
    assert removed[0] in str(raised.value)


def test_unexpected_weights_are_listed_unless_ignored(folder: Path):
    targets = empty_weights(folder)
    extra = {"model.layers.0.self_attn.q_proj.lora_A": torch.ones(4)}
    save_file(stored(folder) | extra, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(ValueError, match=r"no place for: \S+q_proj\.lora_A$"):
        checkpoint.load_into(targets)
    checkpoint.load_into(targets, ignored={"model.layers.0.self_attn.q_proj.lora_A"})
    assert torch.equal(targets[NORM], stored(folder)[NORM])


def test_wrong_shape_names_tensor_and_both_shapes(folder: Path):
    targets = empty_weights(folder) | {NORM: torch.zeros(65)}
    with pytest.raises(ValueError, match=rf"{NORM} .* has shape \(64,\).* asks for \(65,\)"):
        Checkpoint.open(folder).load_into(targets)


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def write_config(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)


Harm = Callable[[Path], object]
HARMS: dict[str, tuple[Harm, str]] = {
    "pickled": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        r"pickled \(pytorch_model.bin\), convert",
    ),
    "damaged": (
        lambda f: (f / "model.safetensors").write_bytes(b"x" * 100),
        "model.safetensors is no readable safetensors file",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "it has no config.json"),
    "no architecture": (
        lambda f: change_config(f, lambda config: config.pop("architectures")),
        "states no architectures",
    ),
    **{
        content: (partial(write_config, content), "single/config.json (cannot be used|is no valid)")
        for content in ("{", "{}", '{"model_type": "gpt9"}')
    },
}


@pytest.mark.parametrize("harm", HARMS)
def test_the_error_for_a_damaged_folder_names_the_cause(folder: Path, harm: str):
    change, message = HARMS[harm]
    change(folder)
    with pytest.raises(ValueError, match=message):
        _ = list(Checkpoint.open(folder).weights()), Checkpoint.open(folder).architecture


def test_a_missing_shard_and_a_malformed_index_are_named(sharded: Path):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ValueError, match=f"the shard '{shard.name}': .* is not there"):
        list(Checkpoint.open(sharded).weights())
    for content in ("{}", "[]", "{", '{"weight_map": 3}'):
        (sharded / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ValueError, match=r"index.json (is no|must hold a JSON object)"):
            list(Checkpoint.open(sharded).weights())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        *((name, f"folder '{name}' does not exist") for name in ("/no/such", "./none", "a/b/c")),
        ("nobody/nothing", "'nobody/nothing' is no folder.*Hugging Face hub"),
        (__file__, "is a file; a checkpoint is a folder"),
    ],
)
def test_a_model_that_is_not_a_folder_is_an_error(model: str, message: str):
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(model)


PREFIXES = {"thinker": "thinker.", "talker": "talker.", "code2wav": "token2wav."}
EMBEDDING = "thinker.model.embed_tokens.weight"


@pytest.fixture(scope="module")
def omni(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_omni")


class _CountingFile:
    """Safetensors file that counts reads of tensors and rows."""

    def __init__(self, file: Any, read: Counter[str], rows: Counter[str]) -> None:
        self._file, self._read, self._rows = file, read, rows

    def __enter__(self) -> _CountingFile:
        self._opened = self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, name: str) -> Any:
        self._read[name] += 1
        return self._opened.get_tensor(name)

    def get_slice(self, name: str) -> Any:
        rows, matrix = self._rows, self._opened.get_slice(name)

        class Slice:
            get_shape, get_dtype = matrix.get_shape, matrix.get_dtype

            def __getitem__(self, key: slice) -> Any:
                rows[name] += key.stop - key.start
                return matrix[key]

        return Slice()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Number of complete reads and of single rows read, by tensor."""
    whole: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    monkeypatch.setattr(
        weight_files,
        "safe_open",
        lambda path, **how: _CountingFile(safe_open(path, **how), whole, rows),
    )
    yield whole, rows


def test_every_weight_belongs_to_one_part(omni: str):
    named = [
        prefix + name
        for part, prefix in PREFIXES.items()
        for name in open_checkpoint(omni, part=part).weight_files
    ]
    assert sorted(named) == sorted(stored(omni))


def test_weights_of_a_part_are_named_without_its_prefix(omni: str):
    weights = stored(omni)
    for name, tensor in open_checkpoint(omni, part="talker").weights():
        assert torch.equal(tensor, weights[f"talker.{name}"])


def test_a_part_has_its_own_config(omni: str):
    talker = open_checkpoint(omni, part="talker")
    assert talker.config.model_type == "qwen2_5_omni_talker"
    assert talker.architecture == "Qwen2_5OmniTalkerForConditionalGeneration"
    # The generation config is that of the thinker.
    assert talker.generation_config is None
    assert open_checkpoint(omni, part="thinker").generation_config is not None


@pytest.mark.parametrize("part", PREFIXES)
def test_an_engine_reads_its_own_part_once_and_no_other(
    omni: str, part: str, reads: tuple[Counter[str], Counter[str]]
):
    whole, rows = reads
    if part == "code2wav":
        GeneratorEngine(GeneratorConfig(model=omni, part=part, device="cpu"))
    else:
        LLMEngine(EngineConfig(model=omni, part=part, device="cpu", num_blocks=8, max_model_len=64))
    assert whole == Counter(name for name in stored(omni) if name.startswith(PREFIXES[part]))
    # The talker uses the thinker's embeddings of BOS (one per voice), EOS and padding.
    assert rows == (Counter({EMBEDDING: 4}) if part == "talker" else Counter())


def test_single_rows_of_another_part_can_be_read(omni: str):
    rows = WeightFiles(Path(omni)).rows(EMBEDDING, [5, 2])
    assert torch.equal(rows, stored(omni)[EMBEDDING][[5, 2]])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (None, "holds several models; say by part which: thinker, talker, code2wav"),
        ("talkr", "no part 'talkr'.*did you mean 'talker'"),
    ],
)
def test_a_missing_or_unknown_part_is_an_error(omni: str, part: str | None, message: str):
    with pytest.raises(ValueError, match=message):
        open_checkpoint(omni, part=part)


def test_a_part_of_another_kind_is_refused(omni: str, qwen2_checkpoint: str):
    with pytest.raises(ValueError, match="unsupported architecture 'Qwen2_5OmniToken2WavModel'"):
        LLMEngine(EngineConfig(model=omni, part="code2wav"))
    with pytest.raises(ValueError, match="one model without parts"):
        open_checkpoint(qwen2_checkpoint, part="thinker")


@pytest.mark.parametrize(("name", "index"), [("thinker.nothing", 0), (EMBEDDING, 768)])
def test_missing_rows_are_refused(omni: str, name: str, index: int):
    with pytest.raises(ValueError, match=r"lacks the weights|in .* has rows 0 to 767"):
        WeightFiles(Path(omni)).rows(name, [index])


MODELS = [("llava", None), ("qwen2_5_vl", None), ("qwen2_5_omni", "thinker")]
MESSAGE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]}


def answer(folder: str | Path, part: str | None) -> RequestOutput:
    chat = ChatPrompt((MESSAGE,), {"image": [Image.new("RGB", (60, 40), "teal")]})
    config = EngineConfig(model=str(folder), part=part, num_blocks=64, max_model_len=256)
    with closing(LLMEngine(config)) as engine:
        (output,) = engine.generate([chat], SamplingParams(max_tokens=16, ignore_eos=True))
    return output


@pytest.mark.parametrize(("name", "part"), MODELS)
def test_the_published_layout_has_the_same_output_and_eos_tokens(
    name: str, part: str | None, seeded: Callable[[str], str], tmp_path: Path
):
    folders = (seeded(name), publish(seeded(name), tmp_path / "model"))
    seeded_output, published = (answer(folder, part) for folder in folders)
    assert seeded_output.prompt_token_ids == published.prompt_token_ids, "the processor's template"
    assert seeded_output.outputs[0].token_ids == published.outputs[0].token_ids
    found = []
    for each in folders:
        checkpoint = open_checkpoint(each, part=part)
        tokenizer = load_tokenizer(each)
        found.append(eos_token_ids(checkpoint.config, checkpoint.generation_config, tokenizer))
    assert found[0] == found[1] != frozenset()


LIMITS: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_model_len": 32}


def install_sources(monkeypatch: pytest.MonkeyPatch, **objects: str) -> None:
    """Pretend that packages with these entry points of model sources are installed."""
    found = EntryPoints(EntryPoint(name, value, ENTRY_POINTS) for name, value in objects.items())
    monkeypatch.setattr(checkpoint, "entry_points", lambda **chosen: found.select(**chosen))


def locate(reference: str) -> str:
    if reference != "made:up":
        raise ValueError(f"there is no model {reference!r}")
    return "/a/folder"


@pytest.mark.parametrize("model", ["org/name", "gpt2", "a folder", "C:/models/mine", "./x", ""])
def test_names_without_a_source_are_ignored(model: str) -> None:
    assert folder_of_source(model) is None


def test_a_package_provides_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    install_sources(monkeypatch, made=f"{__name__}:locate")
    assert folder_of_source("made:up") == Path("/a/folder")
    with pytest.raises(ValueError, match="there is no model 'made:down'"):
        folder_of_source("made:down")


def test_the_error_for_an_unknown_source_lists_the_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_sources(monkeypatch, made=f"{__name__}:locate", torn="nowhere.at.all:locate")
    with pytest.raises(ValueError, match="'maid:up': no installed .* known are made:, torn:"):
        Checkpoint.open("maid:up")
    with pytest.raises(ValueError, match="'torn:x': 'nowhere.at.all:locate' cannot be loaded: Mod"):
        Checkpoint.open("torn:x")


def test_a_folder_takes_precedence_over_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_sources(monkeypatch, made=f"{__name__}:locate")
    monkeypatch.chdir(tmp_path)
    Path("made:up").mkdir()
    with pytest.raises(ValueError, match="config.json"):
        Checkpoint.open("made:up")


@pytest.mark.usefixtures("checkpoint_cache")
def test_seeded_models_are_accepted_wherever_a_model_is() -> None:
    prompt, greedy = TokensPrompt((5, 6, 7)), SamplingParams(temperature=0.0, max_tokens=3)
    config = EngineConfig(model="seeded:qwen2", **LIMITS)
    expected = LLMEngine(config).generate(prompt, greedy)[0].outputs[0].token_ids
    with Omni(Pipeline([AutoregressiveStage("writer", config, sampling=greedy)])) as omni:
        assert omni.generate(prompt)[0].stages["writer"].token_ids == expected
    assert EncoderEngine(EngineConfig(model="seeded:bert", **LIMITS)).hidden_size
    with pytest.raises(ValueError, match="unknown seeded model 'seeded:qwne2'"):
        LLMEngine(EngineConfig(model="seeded:qwne2"))


def test_an_encoder_loads_without_output(
    bert_checkpoint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    EncoderEngine(EngineConfig(model=bert_checkpoint, num_blocks=8, max_model_len=16)).close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_configs_of_several_parts_open_without_output(
    seeded: Callable[[str], str], caplog: pytest.LogCaptureFixture, family: str
) -> None:
    open_checkpoint(seeded(family), part="thinker")
    assert caplog.messages == []


def test_progress_bars_are_restored_after_the_context(capfd: pytest.CaptureFixture[str]) -> None:
    made: list[Any] = []

    def users_own(make: Any, args: Any, kwargs: Any) -> Any:
        made.append(kwargs)
        return make(*args, **kwargs)

    before = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    previous = logging.set_tqdm_hook(users_own)
    try:
        with pytest.raises(RuntimeError, match="in the middle"), hidden_progress_bars():
            assert list(logging.tqdm(range(3), desc="hidden")) == [0, 1, 2]
            raise RuntimeError("in the middle")
        assert made == []
        list(logging.tqdm(range(3), desc="shown"))
        assert made == [{"desc": "shown"}]
    finally:
        logging.set_tqdm_hook(previous)
    assert (logging.is_progress_bar_enabled(), are_progress_bars_disabled()) == before
    shown = capfd.readouterr().err
    assert "hidden" not in shown
    assert "shown" in shown or not before[0]


@pytest.mark.parametrize("name", ACT2FN)
def test_an_activation_equals_that_of_transformers(name: str) -> None:
    x = torch.linspace(-9, 9, 999)
    assert torch.equal(activation_of(name)(x), ACT2FN[name](x))


def test_the_error_for_an_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"hidden_act must be one of .*quick_gelu.*, got 'cube'"):
        check_activation("hidden_act", "cube")
    with pytest.raises(ValueError, match=r"got 'cube'"):
        activation_of("cube")
