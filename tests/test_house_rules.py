"""Rules about the source itself that no linter checks."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from tests.support.import_graph import LAYERS, ROOT, imported_packages, modules

MAX_LINES = 900
MAX_CLASS_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
PACKAGES = (*LAYERS, "stage_configs")
INSTALLED = [file for package in PACKAGES for file in modules(package)]
SOURCES = [*INSTALLED, *modules("training")]
_RULED_SOURCES = frozenset(SOURCES)
TESTS = [
    file for folder in ("tests", "examples", "benchmarks", "torture") for file in modules(folder)
]


@lru_cache(1)
def parsed(source: str) -> ast.Module:
    """Return the tree of the current file, shared by several rules; none modifies it."""
    return ast.parse(source)


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", SOURCES + TESTS, ids=relative)
def test_a_file_keeps_the_rules(file: Path):
    """All rules in one test: each reads the same tree."""
    source = file.read_text("utf-8")
    found = [*too_long(source), *unsafe_loads(source)]
    if file in _RULED_SOURCES:
        found += [*wrongly_named(file.stem, source), *too_large(source)]
        found += [f"{each} takes any error, and says not why" for each in broad_handlers(source)]
        found += vague_docstrings(source)
    assert not found, "\n" + "\n".join(found)


def test_a_planted_long_file_is_found():
    assert list(too_long("x = 1\n" * 901)) == ["901 lines, of at most 900; split it by concept"]
    assert not list(too_long("x = 1\n" * 900))


def too_long(source: str) -> Iterator[str]:
    """Report a file that is too long to be read."""
    lines = len(source.splitlines())
    if lines > MAX_LINES:
        yield f"{lines} lines, of at most {MAX_LINES}; split it by concept"


@pytest.mark.parametrize(
    ("name", "planted", "message"),
    [
        ("utils", '"""Says."""', "utils is no noun for what is in it"),
        ("noun", "x = 1", "no module docstring"),
    ],
)
def test_a_planted_wrong_name_is_found(name: str, planted: str, message: str):
    assert list(wrongly_named(name, planted)) == [message]
    assert not list(wrongly_named("__main__", '"""Says."""'))


def wrongly_named(name: str, source: str) -> Iterator[str]:
    """Report what is wrong with a module's name and its docstring."""
    if name in {"utils", "util", "helpers", "common", "misc"}:
        yield f"{name} is no noun for what is in it"
    if not ast.get_docstring(parsed(source)):
        yield "no module docstring"


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ("class A:\n" + "    x = 1\n" * 600, "line 1: class A has 601 lines, of at most 600"),
        ("def f():\n" + "    x = 1\n" * 60, "line 1: f has 61 lines, of at most 60"),
        (
            "class A:\n    async def f(self):\n" + "        x = 1\n" * 60,
            "line 2: f has 61 lines, of at most 60",
        ),
        ("def f(a, b, c, d, e, f, g): ...", "line 1: f takes 7 parameters, of at most 6"),
        ("def f(a, /, b, *c, d, e, f, **g): ...", "line 1: f takes 7 parameters, of at most 6"),
        (
            "class A:\n    @staticmethod\n    def f(self, b, c, d, e, f, g): ...",
            "line 3: f takes 7 parameters, of at most 6",
        ),
        (
            "class A:\n    def f(self, a, b, c, d, e, f, g): ...",
            "line 2: f takes 7 parameters, of at most 6",
        ),
        (
            "def outer():\n    def f(a, b, c, d, e, f, g): ...",
            "line 2: f takes 7 parameters, of at most 6",
        ),
    ],
)
def test_a_planted_large_thing_is_found(planted: str, message: str):
    assert list(too_large(planted)) == [message]


def test_things_that_just_fit_are_not_found():
    assert not list(too_large("class A:\n" + "    x = 1\n" * 599))
    assert not list(too_large("def f():\n" + "    x = 1\n" * 59))
    assert not list(too_large("class A:\n    def f(self, a, b, *, c, d, e, f): ..."))
    assert not list(too_large("class A:\n    @classmethod\n    def f(cls, a, b, c, d, e, f): ..."))
    assert not list(too_large("class A:\n    def __init__(self, a, b, c, d, e, f, g): ..."))


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


@pytest.mark.parametrize(
    ("planted", "is_found"),
    [
        ("try:\n    f()\nexcept Exception:\n    pass", True),
        ("try:\n    f()\nexcept (ValueError, BaseException) as e:\n    g(e)", True),
        ("try:\n    f()\nexcept:\n    raise ValueError from None", True),
        ("try:\n    f()\nexcept Exception:  # a user's, say\n    pass", False),
        ("try:\n    f()\n# A user's, say.\nexcept Exception:\n    pass", False),
        ("try:\n    f()\nexcept Exception:\n    # A user's, say.\n    pass", False),
        ("try:\n    f()\nexcept BaseException:\n    g()\n    raise", False),
        ("try:\n    f()\nexcept ValueError:\n    pass", False),
    ],
)
def test_a_planted_broad_handler_is_found(planted: str, is_found: bool):
    assert bool(list(broad_handlers(planted))) is is_found


def test_a_planted_vague_docstring_is_found():
    function = 'def f():\n    """What is."""'
    for planted in ('"""Whether it runs."""', 'X = 1\n"""Of a step."""', function):
        assert list(vague_docstrings(planted)), planted
    assert not list(vague_docstrings('"""Scheduler of steps."""\nx = "Of text"'))


def vague_docstrings(source: str) -> Iterator[str]:
    """Report docstrings that begin with a clause instead of what the thing is or does."""
    for node in ast.walk(parsed(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                if text.split(maxsplit=1)[0] in _CLAUSES:
                    yield f"line {node.lineno}: say what it is or does: {text[:40]!r}"


_CLAUSES = {"As", "How", "Is", "Of", "That", "What", "Whether", "Where", "Who", "Why"}


def test_pyproject_lists_every_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    found = {
        str(file.parent.relative_to(ROOT)).replace("/", ".")
        for file in INSTALLED
        if file.name == "__init__.py"
    }
    assert set(listed["tool"]["setuptools"]["packages"]) == found
    folders = {str(file.parent.relative_to(ROOT)).replace("/", ".") for file in INSTALLED}
    assert folders == found, "a folder with modules but no __init__.py"


def test_the_changelog_tells_of_the_version_that_is_built():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    log = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest, *_ = (line for line in log.splitlines() if line.startswith("## "))
    assert newest.startswith(f"## {version}, ")


def too_large(source: str) -> Iterator[str]:
    """Report classes and functions that are too long, and functions with too many parameters.

    Constructors take what the object is made of, and a dataclass writes no function; ``self`` and
    ``cls`` are not counted. A Triton kernel takes all launch parameters, number by number.
    """
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ClassDef) and _lines(node) > MAX_CLASS_LINES:
            yield f"line {node.lineno}: class {node.name} has {_lines(node)} lines, " + (
                f"of at most {MAX_CLASS_LINES}"
            )
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
                continue
            if _lines(node) > MAX_FUNCTION_LINES:
                yield f"line {node.lineno}: {node.name} has {_lines(node)} lines, " + (
                    f"of at most {MAX_FUNCTION_LINES}"
                )
            taken = _parameters(node)
            if len(taken) > MAX_PARAMETERS and node.name not in {"__init__", "__new__"}:
                yield f"line {node.lineno}: {node.name} takes {len(taken)} parameters, " + (
                    f"of at most {MAX_PARAMETERS}"
                )


def _lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count from ``class`` or ``def`` to the last line, without decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    named = [argument.arg for argument in given.posonlyargs + given.args]
    is_static = any(
        isinstance(each, ast.Name) and each.id == "staticmethod" for each in node.decorator_list
    )
    if named[:1] in (["self"], ["cls"]) and not is_static:
        del named[0]
    rest = [argument.arg for argument in (given.vararg, given.kwarg) if argument is not None]
    return named + [argument.arg for argument in given.kwonlyargs] + rest


def broad_handlers(source: str) -> Iterator[str]:
    """Report handlers of any exception that neither re-raise it nor say why in a comment."""
    lines = source.splitlines()
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = (
            [each.id for each in ast.walk(node.type) if isinstance(each, ast.Name)]
            if (node.type)
            else ["BaseException"]
        )
        if not {"Exception", "BaseException"} & set(kinds):
            continue
        last = node.body[-1]
        if isinstance(last, ast.Raise) and last.exc is None:
            continue
        if not any("#" in line for line in lines[node.lineno - 2 : node.body[0].lineno]):
            yield f"line {node.lineno}: {lines[node.lineno - 1].strip()}"


def unsafe_loads(source: str) -> list[str]:
    """Return imports and calls that would execute a file's contents."""
    found = [
        f"line {line}: import of {name}"
        for line, name in imported_packages(parsed(source))
        if name in {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    ]
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and _is_named_so(node.func) and _is_unsafe(node):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def _is_named_so(function: ast.expr) -> bool:
    """Return True if the name is worth writing out: most calls have other names."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in {"load", "unsafe_load", "full_load", "eval", "exec"}
        case _:
            return False


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
