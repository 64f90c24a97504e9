"""Rules about the source itself that no linter knows."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.support.import_graph import LAYERS, ROOT, imported_packages, modules

MAX_LINES = 500
PACKAGES = (*LAYERS, "stage_configs")
SOURCES = [file for package in PACKAGES for file in modules(package)]
TESTS = [file for folder in ("tests", "examples", "benchmarks") for file in modules(folder)]


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", SOURCES + TESTS, ids=relative)
def test_file_is_short_enough_to_read(file: Path):
    lines = len(file.read_text("utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines; split it by noun"


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_file_is_named_for_a_noun_and_says_what_is_public(file: Path):
    assert file.stem not in {"utils", "util", "helpers", "common", "misc"}
    tree = ast.parse(file.read_text("utf-8"))
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    assert "__all__" in assigned or file.name == "__main__.py", "no __all__"
    assert ast.get_docstring(tree), "no module docstring"


@pytest.mark.parametrize("file", SOURCES + TESTS, ids=relative)
def test_no_code_is_loaded_from_data(file: Path):
    assert unsafe_loads(file.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from dill import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "eval(text)",
    ],
)
def test_a_planted_unsafe_load_is_found(planted: str):
    assert len(unsafe_loads(planted)) == 1


def test_safe_loads_are_not_found():
    assert unsafe_loads("torch.load(p, weights_only=True)\nyaml.safe_load(t)\nmodel.eval()") == []


def test_pyproject_lists_every_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    found = {
        str(file.parent.relative_to(ROOT)).replace("/", ".")
        for file in SOURCES
        if file.name == "__init__.py"
    }
    assert set(listed["tool"]["setuptools"]["packages"]) == found
    folders = {str(file.parent.relative_to(ROOT)).replace("/", ".") for file in SOURCES}
    assert folders == found, "a folder with modules but no __init__.py"


def unsafe_loads(source: str) -> list[str]:
    """Imports and calls that would run what a file says."""
    found = [
        f"line {line}: import of {name}"
        for line, name in imported_packages(source)
        if name in {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _is_unsafe(node):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def _is_unsafe(call: ast.Call) -> bool:
    match ast.unparse(call.func):
        case "torch.load":
            return not any(
                keyword.arg == "weights_only"
                and isinstance(keyword.value, ast.Constant)
                and keyword.value.value is True
                for keyword in call.keywords
            )
        case "yaml.load" | "yaml.unsafe_load" | "yaml.full_load" | "eval" | "exec":
            return True
        case _:
            return False
