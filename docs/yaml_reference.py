"""Generates the YAML reference, ``docs/yaml.md``, and the JSON Schema for editors.

    python -m docs.yaml_reference      # rewrite both

Both come from the output of ``omni schema``. A test compares them with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omni.pipelines.config_schema import config_schema
from stages.autoregressive import AutoregressiveStageConfig
from stages.encoder import EncoderStageConfig
from stages.generator import GeneratorStageConfig
from stages.stage_config import StageConfig

PAGE = Path(__file__).parent / "yaml.md"
SCHEMA_FILE = Path(__file__).parents[1] / "stage_configs" / "pipeline.schema.json"

_KINDS: Mapping[str, type[StageConfig]] = {
    "autoregressive": AutoregressiveStageConfig,
    "encoder": EncoderStageConfig,
    "generator": GeneratorStageConfig,
}
"""The built-in kinds; those of other packages are in neither file."""

EXAMPLE = """\
# yaml-language-server: $schema=pipeline.schema.json
name: first
stages:
  writer:
    kind: autoregressive
    model: seeded:qwen2          # or a folder, or a Hugging Face hub id
    engine: {block_size: 16, num_blocks: 512, max_num_batched_tokens: 512}
    sampling: {temperature: 0.0, max_tokens: 24}
    outputs: [hidden_states]
    final_output: text
  reader:
    kind: autoregressive
    model: seeded:llama
    sampling: {temperature: 0.0, max_tokens: 16}
    inputs: {from: writer, transform: hidden_states_as_prompt_embeds}
    outputs: []
    final_output: text
"""

_HEAD = f"""\
# YAML reference

```yaml
{EXAMPLE}```

A file defines the stages, each with its model, and the edges between them. `omni validate FILE`
checks it without loading a model, `omni explain FILE` shows it with every default, and
`--set stages.writer.engine.num_blocks=64` changes a value for one run. An unknown key, a value out
of range and a number in quotes are errors that state the position and name the nearest valid key.

The first line of the example lets editors complete and check keys. `omni schema >
pipeline.schema.json` writes the file that it names, a JSON Schema of draft 2020-12. The shipped
pipelines name the schema file next to them.

Write a list of one name as the name alone: `final_output: text` is `final_output: [text]`.
The tables below are generated from the schema.
"""

_PARTS = (
    ("Where stages run", ("RuntimeConfig", "Placement")),
    ("Inputs of a stage", ("StageInputs",)),
    (
        "Engine settings",
        ("EngineSettings", "OffloadSettings", "DiskSettings", "GeneratorSettings"),
    ),
    ("Sampling", ("SamplingParams", "StructuredOutput")),
    ("Transcription", ("TranscriptionOptions",)),
    ("Sound generation", ("GenerationParams", "StreamWindow", "RecordedVoice")),
    ("Limits of one request", ("RequestLimits", "MediaLimits")),
)
_STAGES = "stages"
_SIGNS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))


def schema_text() -> str:
    """Return the schema, as ``omni schema`` prints it without kinds of other packages."""
    return json.dumps(config_schema(_KINDS), indent=2) + "\n"


def page() -> str:
    """Return the page."""
    schema = config_schema(_KINDS)
    parts = schema["$defs"]
    lines = [_HEAD, "## The file\n", *_table(schema)]
    for name, kind in _KINDS.items():
        part = parts.pop(kind.__name__)
        lines += [f"## A stage of kind `{name}`\n", f"{part['description']}\n", *_table(part)]
    for title, names in _PARTS:
        lines.append(f"## {title}\n")
        for name in names:
            part = parts.pop(name)
            lines += [f"### `{name}`\n", f"{part['description']}\n", *_table(part)]
    if parts:
        raise ValueError(f"the schema has parts that no section tells of: {', '.join(parts)}")
    return "\n".join(lines)


def _table(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of a mapping, one row per key."""
    yield "| key | value | default | |"
    yield "|---|---|---|---|"
    required = part.get("required", ())
    for key, value in part["properties"].items():
        kind = "a mapping of names to stages" if key == _STAGES else _kind(value)
        default = "**required**" if key in required else _default(value)
        words = value["description"].replace("|", "\\|").replace("<", "&lt;")
        yield f"| `{key}` | {kind} | {default} | {words} |"
    yield ""


def _kind(value: Mapping[str, Any]) -> str:
    """Describe the type of a value."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        kinds = [_kind(each) for each in value["anyOf"] if each.get("type") != "null"]
        # A name instead of a list of one is explained once, for all keys.
        lists = [kind for kind in kinds if kind.startswith("list of")]
        return " or ".join(dict.fromkeys(lists or kinds))
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{each}`" for each in value["enum"])
    if value["type"] == "array":
        items = value.get("items", {})
        return f"list of {_kind(items)}" if items else "list"
    if value["type"] == "object":
        return "mapping"
    bounds = [f"{sign} {value[key]:,}" for key, sign in _SIGNS if key in value]
    return " ".join([value["type"], ", ".join(bounds)]).strip()


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default")
    if default in (None, {}, []) or isinstance(default, dict):
        return ""
    return f"`{json.dumps(default)}`" if not isinstance(default, str) else f"`{default}`"


def main() -> None:
    """Write the page and the schema."""
    PAGE.write_text(page(), "utf-8")
    SCHEMA_FILE.write_text(schema_text(), "utf-8")


if __name__ == "__main__":
    main()
