"""Checkpoints in the layout of sentence-transformers are pooled and normalized accordingly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from engine import EngineConfig, TextPrompt, TokensPrompt
from stages import EncoderStage, StageRequest
from tests.support.settled_stages import run_stage

TEXTS = ["Rain fell all day.", "HM", "the tide comes in twice a day, and goes out as often"]
MEAN = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False}
MEAN |= {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
TRANSFORMER = ("", "Transformer")
POOLING, NORMALIZE = ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")
Make = Callable[..., Path]


@pytest.fixture
def make(seeded: Callable[[str], str], tmp_path: Path) -> Make:
    def build(
        *modules: tuple[str, str],
        model: str = "bert",
        pooling: Mapping[str, Any] = MEAN,
        **files: Any,
    ) -> Path:
        """Make a seeded checkpoint in this layout; ``files`` by the stems of their names."""
        folder = tmp_path / "checkpoint"
        shutil.copytree(seeded(model), folder)
        entries = [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (path, kind) in enumerate(modules or (TRANSFORMER, POOLING, NORMALIZE))
        ]
        for path, _ in (POOLING, *modules):
            (folder / path).mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        for stem, content in ({"modules": entries} | files).items():
            (folder / f"{stem}.json").write_text(json.dumps(content))
        return folder

    return build


def stage_of(folder: Path, **options: Any) -> EncoderStage:
    config = EngineConfig(
        model=str(folder), num_blocks=64, block_size=4, **options.pop("engine", {})
    )
    return EncoderStage("s", config, outputs=["pooled"], **options)


def pooled(stage: EncoderStage, prompts: list[Any]) -> list[Tensor]:
    requests = [StageRequest(str(index), prompt) for index, prompt in enumerate(prompts)]
    last = run_stage(stage, *requests)
    return [last[request.request_id].tensors["pooled"] for request in requests]


def rows(folder: Path, text: str, **lengths: Any) -> Tensor:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", **lengths)
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        hidden: Tensor = model(**inputs).last_hidden_state[0]
    return hidden


def unit(row: Tensor) -> Tensor:
    return row / row.norm()


def test_normalized_means_equal_transformers(make: Make) -> None:
    folder = make()
    stage = stage_of(folder)
    for _ in range(2):
        for found, text in zip(pooled(stage, TEXTS), TEXTS, strict=True):
            expected = unit(rows(folder, text).mean(0))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


WAYS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "cls": ({"pooling_mode_cls_token": True}, lambda x: x[0]),
    "last": ({"pooling_mode_lasttoken": True, "include_prompt": False}, lambda x: x[-1]),
    "mean by its name": ({"pooling_mode": "mean"}, lambda x: x.mean(0)),
    "cls in a list": ({"pooling_mode": ["cls"]}, lambda x: x[0]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["bert", "qwen2"])
def test_the_pooling_is_read_from_the_checkpoint(make: Make, way: str, model: str) -> None:
    config, pool = WAYS[way]
    folder = make(TRANSFORMER, POOLING, model=model, pooling=config)
    stage = stage_of(folder, engine={"max_model_len": 64, "max_num_batched_tokens": 64})
    (found,) = pooled(stage, TEXTS[:1])
    torch.testing.assert_close(found, pool(rows(folder, TEXTS[0])), atol=1e-5, rtol=0)


def test_options_of_the_stage_override_the_checkpoint(make: Make) -> None:
    unsupported = {"pooling_mode_max_tokens": True}
    folder = make(pooling=unsupported)
    with pytest.raises(ValueError, match=r"1_Pooling/config\.json: pooling_mode_max_tokens is"):
        stage_of(folder)
    whole = rows(folder, TEXTS[0])
    for pooling, normalize, expected in (
        ("cls", None, unit(whole[0])),
        ("mean", False, whole.mean(0)),
        ("last", True, unit(whole[-1])),
    ):
        (found,) = pooled(stage_of(folder, pooling=pooling, normalize=normalize), TEXTS[:1])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_normalize_works_without_the_layout(
    seeded: Callable[[str], str],
) -> None:
    folder = Path(seeded("bert"))
    (plain,) = pooled(stage_of(folder, pooling="mean"), TEXTS[:1])
    (found,) = pooled(stage_of(folder, pooling="mean", normalize=True), TEXTS[:1])
    torch.testing.assert_close(plain, rows(folder, TEXTS[0]).mean(0), atol=1e-5, rtol=0)
    torch.testing.assert_close(found, unit(plain), atol=1e-6, rtol=0)


def test_texts_but_not_ids_are_stripped_lowered_and_prefixed(make: Make) -> None:
    prompts = {"prompts": {"query": "About "}, "default_prompt_name": "query"}
    folder = make(
        sentence_bert_config={"max_seq_length": 40, "do_lower_case": True},
        config_sentence_transformers=prompts,
    )
    stage = stage_of(folder)
    ids = tuple(AutoTokenizer.from_pretrained(folder)("Rain", add_special_tokens=True).input_ids)
    text, written, plain = pooled(stage, ["  Rain ", TextPrompt("RAIN"), TokensPrompt(ids)])
    expected = unit(rows(folder, "about rain").mean(0))
    torch.testing.assert_close(text, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(written, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(plain, unit(rows(folder, "Rain").mean(0)), atol=1e-5, rtol=0)


def test_inputs_longer_than_the_checkpoint_allows_are_refused_and_not_truncated(make: Make) -> None:
    folder = make(sentence_bert_config={"max_seq_length": 10})
    with pytest.raises(ValueError, match="11 tokens, but max_model_len is 10"):
        pooled(stage_of(folder), [TokensPrompt(tuple(range(30, 41)))])
    # The user's limit has precedence.
    pooled(stage_of(folder, engine={"max_model_len": 12}), [TokensPrompt(tuple(range(30, 41)))])


@pytest.mark.parametrize("bias", [True, False])
def test_a_dense_layer_is_applied_before_normalizing(make: Make, bias: bool) -> None:
    folder = make(TRANSFORMER, POOLING, ("2_Dense", "Dense"), ("3_Normalize", "Normalize"))
    generator = torch.Generator().manual_seed(0)
    weights = {"linear.weight": torch.randn(24, 64, generator=generator)}
    if bias:
        weights["linear.bias"] = torch.randn(24, generator=generator)
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    activation = "torch.nn.modules.activation.Tanh"
    dense = {"in_features": 64, "out_features": 24, "bias": bias, "activation_function": activation}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    (found,) = pooled(stage_of(folder), TEXTS[:1])
    mean = rows(folder, TEXTS[0]).mean(0)
    expected = torch.tanh(weights["linear.weight"] @ mean + weights.get("linear.bias", 0))
    torch.testing.assert_close(found, unit(expected), atol=1e-5, rtol=0)


DENSE = ("2_Dense", "Dense")
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "an unknown module": ((TRANSFORMER, POOLING, ("2_Asym", "Asym")), {}, "module 2 is a Asym"),
    "no pooling": ((TRANSFORMER, ("1_Pooling", "Normalize")), {}, "got Transformer, Normalize"),
    "something behind": ((TRANSFORMER, POOLING, NORMALIZE, DENSE), {}, "module 2 is a Normalize"),
    "a list of what": ((), {"modules": ["Transformer"]}, "must be a list of modules"),
    "code": (
        (),
        {"modules": [{"idx": 0, "path": "", "type": "mine.Transformer"}]},
        "'mine.Transformer' is code that the checkpoint brings, which is not run",
    ),
    "a way out": ((TRANSFORMER, ("../1_Pooling", "Pooling")), {}, "leads out of the checkpoint's"),
    "no index": (
        (),
        {"modules": [{"path": "", "type": "sentence_transformers.models.Transformer"}]},
        r"modules\.json: idx must be int, got nothing",
    ),
    "two ways": (
        (),
        {"pooling": MEAN | {"pooling_mode_cls_token": True}},
        r"1_Pooling/config\.json: exactly one way of pooling",
    ),
    "no way": ((), {"pooling": {}}, "exactly one way of pooling must be chosen, got none"),
    "a new way": ((), {"pooling": {"pooling_mode": "best"}}, "pooling_mode is 'best'"),
    "a wrong length": (
        (),
        {"sentence_bert_config": {"max_seq_length": "long"}},
        r"sentence_bert_config\.json: max_seq_length must be int, got 'long'",
    ),
    "no length": ((), {"sentence_bert_config": {"max_seq_length": 0}}, "must be at least 1, got 0"),
    "a part of the prompt": (
        (),
        {
            "pooling": MEAN | {"include_prompt": False},
            "config_sentence_transformers": {"prompts": {"q": "q"}, "default_prompt_name": "q"},
        },
        "include_prompt is false",
    ),
    "an unknown prompt": (
        (),
        {"config_sentence_transformers": {"prompts": {}, "default_prompt_name": "q"}},
        r"config_sentence_transformers\.json: q must be str, got nothing",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_unsupported_settings_are_refused_by_file_and_key(make: Make, case: str) -> None:
    modules, files, expected = CASES[case]
    with pytest.raises(ValueError, match=expected):
        stage_of(make(*modules, **files))


DENSE_CONFIG: dict[str, Any] = {"in_features": 64, "out_features": 8, "bias": False}
DENSE_CONFIG |= {"activation_function": "torch.nn.modules.linear.Identity"}
WRONG_DENSE: dict[str, tuple[dict[str, Any], dict[str, Tensor] | None, str]] = {
    "an activation": (
        {"activation_function": "os.system"},
        {"linear.weight": torch.zeros(8, 64)},
        "activation_function is 'os.system'",
    ),
    "pickled": ({}, None, r"has no model\.safetensors; pickled weights are not read"),
    "a shape": ({}, {"linear.weight": torch.zeros(9, 64)}, r"must be \[8, 64\] by .* got \[9, 64"),
    "no bias": ({"bias": True}, {"linear.weight": torch.zeros(8, 64)}, "linear.bias must be"),
    "integers": ({}, {"linear.weight": torch.zeros(8, 64).int()}, "must be floating point"),
}


@pytest.mark.parametrize("case", WRONG_DENSE)
def test_a_dense_layer_that_cannot_be_read_is_refused(make: Make, case: str) -> None:
    changes, weights, expected = WRONG_DENSE[case]
    folder = make(TRANSFORMER, POOLING, DENSE)
    (folder / "2_Dense" / "config.json").write_text(json.dumps(DENSE_CONFIG | changes))
    if weights is None:
        (folder / "2_Dense" / "pytorch_model.bin").touch()
    else:
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(ValueError, match=expected):
        stage_of(folder)


POOLING_FILE, MODULES_FILE = "1_Pooling/config.json", "modules.json"
HOSTILE: dict[str, tuple[str, str, str]] = {
    "a key twice": (POOLING_FILE, '{"pooling_mode": "mean", "pooling_mode": "cls"}', "there twice"),
    "a list": (POOLING_FILE, '{"pooling_mode": ' + "[[]]}", "what is supported is"),
    "deeper": (MODULES_FILE, "[" * 100_000 + "]" * 100_000, "nested too deeply"),
    "many digits": (MODULES_FILE, '[{"idx": ' + "9" * 5000 + "}]", "digits"),
    "no number": (MODULES_FILE, '[{"idx": NaN}]', "NaN is no number"),
    "long": (POOLING_FILE, " " * 2**20 + "{}", "has 1048578 bytes; .* at most 1048576"),
    "no text": (MODULES_FILE, "[\ud800]", "is no valid JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_malformed_files_are_refused(make: Make, case: str) -> None:
    name, content, expected = HOSTILE[case]
    folder = make()
    (folder / name).write_text(content, errors="surrogatepass")
    with pytest.raises(ValueError, match=rf"{name}.*{expected}"):
        stage_of(folder)


@pytest.mark.parametrize(
    "name",
    [
        MODULES_FILE,
        POOLING_FILE,
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
    ],
)
def test_links_out_of_the_checkpoint_are_refused(make: Make, tmp_path: Path, name: str) -> None:
    plain: dict[str, Any] = {"sentence_bert_config": {}, "config_sentence_transformers": {}}
    folder = make(TRANSFORMER, POOLING, DENSE, **plain)
    (folder / "2_Dense" / "config.json").write_text(json.dumps(DENSE_CONFIG))
    save_file({"linear.weight": torch.zeros(8, 64)}, folder / "2_Dense" / "model.safetensors")
    stage_of(folder).close()
    outside = tmp_path / "elsewhere"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(ValueError, match=rf"{name} is a link to .*elsewhere.* outside"):
        stage_of(folder)
