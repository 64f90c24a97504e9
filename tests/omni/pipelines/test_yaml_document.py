"""A YAML text is plain data of a bounded size, or an error that names the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni.pipelines import yaml_document
from omni.pipelines.pipeline_config import PipelineConfig
from omni.pipelines.yaml_document import ConfigError, YamlDocument


def billion_laughs(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        aliases = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} [{aliases}]")
    return "\n".join(lines)


def merges(levels: int) -> str:
    lines = ["a0: &a0 {k: v}"]
    for level in range(1, levels):
        aliases = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} {{<<: [{aliases}], k{level}: v}}")
    return "\n".join(lines)


def chain(levels: int) -> str:
    return "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, levels))])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (billion_laughs(9), ":5: this stands for 111111 keys and values, each alias counted"),
        (merges(9), "keys and values, each alias counted; 100000 are read at most"),
        (chain(100), "nested deeper than 64 levels"),
        ("[" * 100, "y:1: nested deeper than 64 levels"),
        ("x: " + "[" * 65 + "]" * 65, "nested deeper than 64 levels"),
        ("x: [" + "[]," * 100_001 + "]", "y: the text has 300008 characters; 262144 are read"),
        ("x: 1" + ":59" * 40, "y:1: a number of 121 digits; 64 are read at most"),
        ("\nx: 0x" + "f" * 100, "y:2: a number of 102 digits"),
        ("a: &a [*a]", "y:1: an alias contains itself"),
        ("a: &a\n  b: *a", "y:2: an alias contains itself"),
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
def test_what_would_take_too_much_or_is_none_is_refused_with_its_line(text: str, told: str):
    with pytest.raises(ConfigError) as caught:
        YamlDocument.parse(text, "y")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_just_fits_is_read(monkeypatch: pytest.MonkeyPatch):
    text = "a: &a [1, 2]\nb: [*a, *a]\nc: 99999"
    limits = {"CHARS": len(text), "DEPTH": 4, "NODES": 15, "NUMBER_CHARS": 5}
    for name, value in limits.items():
        monkeypatch.setattr(yaml_document, f"MAX_{name}", value)
    document = YamlDocument.parse(text, "y")
    assert document.data == {"a": [1, 2], "b": [[1, 2], [1, 2]], "c": 99999}
    assert document.lines[("b", 1, 0)] == 1
    for name, value in limits.items():
        with monkeypatch.context() as tighter:
            tighter.setattr(yaml_document, f"MAX_{name}", value - 1)
            with pytest.raises(ConfigError):
                YamlDocument.parse(text, "y")


def test_a_file_without_an_end_is_refused(tmp_path: Path):
    endless = tmp_path / "zeros.yaml"
    with endless.open("wb") as file:
        file.truncate(2**40)  # takes no room on disk
    with pytest.raises(ConfigError, match="more than 1048580 bytes"):
        PipelineConfig.load(endless)
