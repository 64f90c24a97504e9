"""The YAML schema: shipped files load, and every mistake is reported with its location."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from engine import EngineConfig, SamplingParams
from omni.pipelines.config_file import ConfigError, parse_overrides, parse_yaml, shipped_configs
from omni.pipelines.pipeline_config import PipelineConfig
from stages import AutoregressiveStageConfig
from tests.support.gated_stage import gated_pipeline  # noqa: F401 - registers its kind
from tests.support.tables import rows

TWO_STAGES = """\
name: mine
stages:
  writer:
    kind: autoregressive
    model: seeded:qwen2
    engine:
      block_size: 4
    sampling: {max_tokens: 3, stop: [end]}
    outputs: hidden_states
    final_output: text
  reader:
    kind: autoregressive
    model: seeded:llama
    inputs:
      from: writer
      transform: hidden_states_as_prompt_embeds
    final_output: [text, tensors]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def stage_of(config: PipelineConfig, name: str) -> AutoregressiveStageConfig:
    stage = config.stages[name]
    assert isinstance(stage, AutoregressiveStageConfig)
    return stage


def error_of(path: Path, overrides: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        PipelineConfig.load(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_config_loads_by_its_short_name(name: str) -> None:
    config = PipelineConfig.load(name)
    assert config.name == name
    assert config.description
    assert any(stage.final_output for stage in config.stages.values())


@pytest.mark.parametrize("name", shipped_configs())
def test_written_out_with_all_defaults_a_config_means_the_same(name: str, tmp_path: Path) -> None:
    config = PipelineConfig.load(name)
    text = yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False)
    assert PipelineConfig.load(write(tmp_path, text)) == config


def test_values_and_defaults_reach_the_stage(tmp_path: Path) -> None:
    config = PipelineConfig.load(write(tmp_path, TWO_STAGES))
    writer, reader = stage_of(config, "writer"), stage_of(config, "reader")
    assert writer.engine.block_size == 4
    assert writer.engine.max_num_seqs == EngineConfig.model_fields["max_num_seqs"].default
    assert writer.kind == "autoregressive"
    assert writer.sampling == SamplingParams(max_tokens=3, stop=("end",))
    assert writer.final_output == ("text",)
    assert writer.outputs == ("hidden_states",)
    assert reader.final_output == ("text", "tensors")
    assert reader.inputs is not None
    assert reader.inputs.sources == ("writer",)
    assert reader.outputs is None


def test_a_bias_is_read_from_a_file_and_a_flag_and_written_again(tmp_path: Path) -> None:
    text = TWO_STAGES.replace("max_tokens: 3,", 'max_tokens: 3, logit_bias: {"256": -100, "5": 1},')
    place = "stages.writer.sampling.logit_bias"
    config = PipelineConfig.load(write(tmp_path, text), {f"{place}.7": 2.5})
    sampling = stage_of(config, "writer").sampling
    assert sampling.logit_bias == {5: 1.0, 7: 2.5, 256: -100.0}
    written = yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False)
    assert PipelineConfig.load(write(tmp_path, written)) == config
    assert PipelineConfig.model_validate(config.model_dump(by_alias=True)) == config
    with pytest.raises(ConfigError, match=rf"{place}\.5: should be a number .* got 101"):
        PipelineConfig.load(write(tmp_path, text), {f"{place}.5": 101})
    with pytest.raises(ConfigError, match="quote it: '5'"):
        PipelineConfig.load(write(tmp_path, text.replace('"5"', "5")))


# The setting, the location of the mistake, and the suggested fix.
MISTAKES = rows("""
descripton=x | descripton: unknown key | 'description'
stages.writer.final_outputs=text | stages.writer.final_outputs: unknown key | 'final_output'
stages.writer.engine.blok_size=4 | stages.writer.engine.blok_size: unknown key | mean 'block_size'?
stages.writer.sampling.temprature=0 | stages.writer.sampling.temprature: unknown k | 'temperature'
stages.reader.inputs.form=writer | stages.reader.inputs.form: unknown key | 'from'
stages.writer.engine.model=x | stages.writer.engine.model: unknown key | known are
stages.reader.pooling=mean | stages.reader.pooling: unknown key | known are
stages.writer.kind=autoregresive | writer.kind: unknown kind 'autoregresive' | 'autoregressive'
stages.reader.inputs.from=writr | stages.reader.inputs.from: unknown stage 'writr' | mean 'writer'?
stages.reader.inputs.from=[writer, writer] | stages.reader.inputs.from | twice
stages.reader.inputs.from=[] | stages.reader.inputs.from | at least 1
stages.reader.inputs.transform=text_as_promt | inputs.transform: unknown tr | 'text_as_prompt'
stages.reader.inputs.transform=no_such_module:f | inputs.transform | 'no_such_module'
stages.writer.kind= | stages.writer.kind | 'autoregressive'
stages.writer.engine.block_size='16' | block_size: should be a valid integer, got ' | without quotes
stages.writer.sampling.min_p=1e-2 | stages.writer.sampling.min_p: should be a valid number | 1.0e-5
stages.writer.engine.num_blocks=true | engine.num_blocks: should be a valid integer, got True |
stages.writer.engine=[1] | stages.writer.engine: should be a mapping, got [1] |
stages.writer.engine.dtype=fp32 | stages.writer.engine.dtype | 'float32'
stages.writer.sampling.max_tokens=-1 | max_tokens: should be greater than or equal to 0, got -1 |
stages.writer.engine.max_num_batched_tokens=8 | engine: max_num_batched_tokens (8) mu | max_num_seqs
stages.writer.final_output=audio | final_output: should be 'text' or 'tensors', got 'audio' |
stages.writer.final_output= & stages.reader.final_output= | stages: nothing comes out | final_output
stages.reader.final_output= | stages.reader: no stage takes its output | final_output
stages.writer.model=./nope | stages.writer.model: no such folder or file |
stages.writer.model=x/LONG | stages.writer.model: no such folder or file: 'x/yyy |
stages.writer.model=~unknown-user/x | stages.writer.model: no such folder or file |
stages.reader.inputs.transform=LONG.py:f | stages.reader.inputs.transform | there is no file
stages.reader.inputs.transform=LONG:f | stages.reader.inputs.transform | not installed
stages.writer.model=~/n/o | stages.writer.model: no such |
stages.writer.model=a/b/c | stages.writer.model: no such |
stages.writer.model=seeded:qwen22 | unknown seeded model 'qwen22' | did you mean 'qwen2'?
stages={} | stages | at least 1
""")


@pytest.mark.parametrize(("changes", "place", "fix"), MISTAKES)
def test_a_mistake_is_named_with_its_place_and_the_fix(
    changes: str, place: str, fix: str, tmp_path: Path
) -> None:
    overrides = parse_overrides(changes.replace("LONG", "y" * 5_000).split(" & "))
    message = error_of(write(tmp_path, TWO_STAGES), overrides)
    assert place in message
    assert fix in message
    assert "\n" not in message, "one mistake, one line"
    assert message.startswith("overrides: ") or "mine.yaml:" in message
    assert "overrides: " in message, "the file's lines say something else"


@pytest.mark.parametrize("source", ["reader", "writer"])
def test_a_cycle_is_shown_stage_by_stage(source: str, tmp_path: Path) -> None:
    inputs = {"from": source, "transform": "text_as_prompt"}
    message = error_of(write(tmp_path, TWO_STAGES), {"stages.writer.inputs": inputs})
    circles = {"reader": ("writer -> reader -> writer", "reader -> writer -> reader")}
    assert any(each in message for each in circles.get(source, ("writer -> writer",)))


def test_every_mistake_is_named_at_once_each_with_its_line(tmp_path: Path) -> None:
    text = TWO_STAGES.replace("block_size", "blok_size").replace("from:", "form:")
    lines = error_of(write(tmp_path, text)).splitlines()
    assert any("mine.yaml:7: stages.writer.engine.blok_size: unknown key" in line for line in lines)
    assert any("mine.yaml:15: stages.reader.inputs.form: unknown key" in line for line in lines)
    assert any("stages.reader.inputs.from: missing" in line for line in lines)


@pytest.mark.parametrize("text", ["just text", ""])
def test_what_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    assert "expected a mapping" in error_of(write(tmp_path, text))


def test_a_stage_name_that_could_not_be_a_place_is_refused(tmp_path: Path) -> None:
    message = error_of(write(tmp_path, TWO_STAGES.replace("writer", "wri.ter")))
    assert "a name starts with a letter" in message


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'two_step'"):
        PipelineConfig.load("two_stp")
    assert "no such file" in error_of(tmp_path / "absent.yaml")


def test_a_folder_beside_the_file_is_found_before_one_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("beside", "working"):
        (tmp_path / place / "models/a").mkdir(parents=True)
        (tmp_path / place / "models/a/config.json").write_text("{}")
    (tmp_path / "working/models/b").mkdir()
    (tmp_path / "working/models/b/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "working")
    path = write(tmp_path / "beside", TWO_STAGES)
    both = PipelineConfig.load(path, {"stages.writer.model": "models/a"})
    assert Path(both.stages["writer"].model) == tmp_path / "beside/models/a"
    only_working = PipelineConfig.load(path, {"stages.writer.model": "models/b"})
    assert Path(only_working.stages["writer"].model).resolve() == tmp_path / "working/models/b"
    neither = PipelineConfig.load(path, {"stages.writer.model": "models/c"})
    assert neither.stages["writer"].model == "models/c", "a hub id"


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    message = error_of(write(tmp_path, TWO_STAGES), {"stages.writer.model": "empty"})
    assert "is no checkpoint" in message


def test_an_override_does_not_reach_a_mapping_that_shares_its_anchor(tmp_path: Path) -> None:
    text = TWO_STAGES.replace("engine:\n", "engine: &engine\n").replace(
        "    model: seeded:llama\n", "    model: seeded:llama\n    engine: *engine\n"
    )
    config = PipelineConfig.load(write(tmp_path, text), {"stages.writer.engine.block_size": 8})
    assert stage_of(config, "writer").engine.block_size == 8
    assert stage_of(config, "reader").engine.block_size == 4


def test_override_values_are_yaml() -> None:
    assert parse_overrides(["a.b=64", "c=[x, y]", "d=", "e=p=q", "f=null", "g=true"]) == {
        "a.b": 64,
        "c": ["x", "y"],
        "d": None,
        "e": "p=q",
        "f": None,
        "g": True,
    }


@pytest.mark.parametrize("assignment", ["stages.writer", "=3", "a=[", ""])
def test_a_malformed_override_is_an_error_that_names_it(assignment: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_overrides([assignment])


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("stages.writr.model", "unknown stage 'writr'; did you mean 'writer'?"),
        ("name.x", "name is no mapping but 'mine'"),
    ],
)
def test_an_override_of_what_is_not_there_is_an_error(
    place: str, expected: str, tmp_path: Path
) -> None:
    assert expected in error_of(write(tmp_path, TWO_STAGES), {place: 1})


def test_a_mistake_in_a_flag_names_the_flag_and_others_their_line(tmp_path: Path) -> None:
    file = write(tmp_path, TWO_STAGES.replace("name: mine", "name: mine\nspeaker: 3"))
    flags = ["stages.writer.engine={blok_size: 4, num_blocks: x}", "stages.reader.kind=encodr"]
    with pytest.raises(ConfigError) as raised:
        PipelineConfig.load(file, parse_overrides(flags), flag="--set")
    reported = str(raised.value).splitlines()
    assert "mine.yaml:2: speaker: should be text, got 3" in reported[0]
    assert "--set stages.reader.kind: unknown kind 'encodr'; did you mean 'encoder'?" in reported
    for key in ("blok_size: unknown key", "num_blocks: should be a valid integer"):
        place = "--set stages.writer.engine: stages.writer.engine."
        assert any(line.startswith(place + key) for line in reported), reported


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "y:1:8: not valid YAML"),
        ("name: a\nname: b\n", "y:2: name: given twice (first on line 1)"),
        (TWO_STAGES + "  writer: {}\n", "stages.writer: given twice (first on line 3)"),
        ("on: 1\n", "quote it: 'on'"),
        ("x: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("[" * 1000, "y: not valid YAML: it is nested too deeply"),
        ("a: &a [*a]", "an alias contains itself"),
        ("a: 1\nb: \x07", "y:2: not valid YAML: the character U+0007 is not allowed"),
        ("a: \udc80", "the character U+DC80 is not allowed"),
        ("a: !!int ''", "y: not valid YAML"),
        ("a: !!bool maybe", "y: not valid YAML"),
        ("a: !!timestamp soon", "y: not valid YAML"),
        ("a: 2001-99-99", "y: not valid YAML"),
        ("a: *b", "y:1:4: not valid YAML: found undefined alias"),
        ("--- 1\n--- 2", "y:2:1: not valid YAML"),
    ],
)
def test_text_that_is_no_yaml_is_refused_with_its_line(text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "y")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_aliases_stand_for_what_they_name():
    text = "a: &a [1, 2]\nb: [*a, *a]\nc: 99999"
    data, lines = parse_yaml(text, "y")
    assert data == {"a": [1, 2], "b": [[1, 2], [1, 2]], "c": 99999}
    assert lines[("b", 1, 0)] == 1


@pytest.mark.usefixtures("checkpoint_cache")
def test_a_pipeline_may_ask_all_stages_for_the_same_bits(tmp_path: Path) -> None:
    path = write(tmp_path, "deterministic: true\n" + TWO_STAGES)
    settings = [PipelineConfig.load(path).resolved(name) for name in ("writer", "reader")]
    engines = [each.engine for each in settings if isinstance(each, AutoregressiveStageConfig)]
    assert [engine.deterministic for engine in engines] == [True, True]
    assert engines[0].block_size == 4


def test_a_stage_that_has_no_such_bits_is_named(tmp_path: Path) -> None:
    stage = "{kind: gated, final_output: text, inputs: {from: writer, transform: text_as_prompt}}"
    text = f"deterministic: true\n{TWO_STAGES}  waits: {stage}\n"
    message = error_of(write(tmp_path, text))
    assert "deterministic: stage 'waits' cannot: its kind has no engine.deterministic" in message
