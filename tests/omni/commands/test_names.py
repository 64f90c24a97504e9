"""Names for YAML files: listed, described in a schema, and completed by shells."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from engine.models.registry import FAMILIES
from omni.commands.cli import app
from omni.pipelines.config_file import shipped_configs
from omni.pipelines.config_schema import config_schema
from omni.seeded.checkpoints import SEEDED_MODELS
from stages import registered_transforms
from stages.stage_config import stage_kinds
from tests.support.command_line import omni
from tests.support.import_graph import ROOT

NAMES = {
    "pipelines": shipped_configs(),
    "models": [f"seeded:{name}" for name in SEEDED_MODELS],
    "architectures": [*FAMILIES.rows],
    "transforms": registered_transforms(),
    "kinds": [*stage_kinds()],
}


def test_the_version_is_printed() -> None:
    assert omni("--version", status=0).stdout == f"omni {version('omni-pipeline')}\n"


@pytest.mark.parametrize("what", [*NAMES, None])
def test_everything_that_can_be_named_is_listed(what: str | None) -> None:
    result = omni("list", *([what] if what else []), status=0)
    listed = {line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ")}
    for sort, names in NAMES.items():
        assert set(names) <= listed if what in (sort, None) else not set(names) & listed


def test_an_unknown_sort_of_names_is_an_error() -> None:
    assert "pipelines" in omni("list", "pipelins", status=2).stderr


@cache
def validator() -> Any:
    schema = json.loads(omni("schema").stdout)
    assert schema == config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_pipeline_matches_the_schema(name: str) -> None:
    text = Path(ROOT, "stage_configs", f"{name}.yaml").read_text("utf-8")
    validator().validate(yaml.safe_load(text))
    explained = omni("explain", name, "--no-load").stdout.split("Every setting:")[1]
    validator().validate(yaml.safe_load(explained))


MISTAKES = {
    "an unknown key": "descripton: x",
    "an unknown key of a stage": "stages: {a: {kind: encoder, model: m, sampling: {}}}",
    "no kind": "stages: {a: {model: m}}",
    "an unknown kind": "stages: {a: {kind: encodr, model: m}}",
    "no model": "stages: {a: {kind: encoder}}",
    "no stage": "stages: {}",
    "a number in quotes": "stages: {a: {kind: encoder, model: m, engine: {block_size: '4'}}}",
    "too small a number": "stages: {a: {kind: encoder, model: m, engine: {block_size: 0}}}",
    "an unknown key of the engine": "stages: {a: {kind: encoder, model: m, engine: {blok: 4}}}",
    "an unknown output": "stages: {a: {kind: encoder, model: m, final_output: text}}",
    "an unknown runtime": "runtime: {kind: threads}",
    "a runtime that is no mapping": "runtime: processes",
    "no replica": "stages: {a: {kind: encoder, model: m, placement: {replicas: 0}}}",
    "inputs without a transform": "stages: {a: {kind: encoder, model: m, inputs: {from: b}}}",
}
RIGHT = {
    "one output for a list": "final_output: tensors",
    "a list": "final_output: [tensors]",
    "nothing for a list": "final_output:",
    "one source": "inputs: {from: b, transform: text_as_prompt}",
    "a placement": "placement: {devices: [cpu, 'cuda:1'], replicas: 2, threads: 1}",
    "several sources": "inputs: {from: [b, c], transform: 'mine:mine'}",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_schema_finds_mistakes(mistake: str) -> None:
    good = {"name": "p", "stages": {"a": {"kind": "encoder", "model": "m"}}}
    validator().validate(good)
    with pytest.raises(jsonschema.ValidationError):
        validator().validate(good | yaml.safe_load(MISTAKES[mistake]))


@pytest.mark.parametrize("case", RIGHT)
def test_the_schema_accepts_short_forms_of_lists(case: str) -> None:
    stage = {"kind": "encoder", "model": "m"} | yaml.safe_load(RIGHT[case])
    validator().validate({"name": "p", "stages": {"a": stage}})


def test_the_schema_describes_every_key() -> None:
    schema = config_schema()
    described = {
        f"{name}.{key}": value.get("description")
        for name, definition in {"Pipeline": schema, **schema["$defs"]}.items()
        for key, value in definition.get("properties", {}).items()
    }
    silent = [key for key, words in described.items() if not words]
    assert not silent
    assert described["AutoregressiveStageConfig.outputs"].startswith(
        "names of the tensors to output"
    )
    assert described["EngineSettings.block_size"] == "tokens per KV block."
    assert "from" in schema["$defs"]["StageInputs"]["properties"]


def complete(typed: str) -> list[str]:
    """The completions of an incomplete command line."""
    result = CliRunner().invoke(
        app,
        [],
        prog_name="omni",
        env={
            "_OMNI_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split(" ")) - 1),
        },
    )
    return result.stdout.split()


def test_the_shell_completes_commands_flags_and_pipelines() -> None:
    assert {"run", "validate", "list"} <= set(complete("omni "))
    assert complete("omni val") == ["validate"]
    assert complete("omni run two") == ["two_step"]
    assert complete("omni run two_step --max") == ["--max-tokens"]
    assert "transforms" in complete("omni list ")
