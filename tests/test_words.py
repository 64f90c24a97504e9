"""One word, one meaning: the meaning of a name in the source does not depend on the file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from tests.support.import_graph import LAYERS, ROOT, modules

_OPENAI = "an object of OpenAI's requests, as a line of a file and as the server read it"
TWICE: Mapping[str, str] = {
    "ChatMessage": _OPENAI,
    "ContentPart": _OPENAI,
    "InputAudio": _OPENAI,
}
"""Names that two classes have, with the reason why the meaning is the same."""


def type_names(source: str) -> Iterator[str]:
    """Yield names of all public classes and type aliases in a file.

    Names with an underscore are read in their own file only; type variables do not count.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        is_variable = isinstance(value, ast.Call) and "TypeVar" in ast.unparse(value.func)
        if re.match("[A-Z][A-Za-z0-9]*[a-z]", name) and not is_variable:
            yield name


def doubles(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return names that several files, or one file several times, give to a class or a type."""
    found: dict[str, list[str]] = {}
    for file, source in sources.items():
        for name in type_names(source):
            found.setdefault(name, []).append(file)
    return {name: files for name, files in found.items() if len(files) > 1}


def test_no_class_name_occurs_twice():
    sources = {
        str(file.relative_to(ROOT)): file.read_text("utf-8")
        for package in LAYERS
        for file in modules(package)
    }
    found = doubles(sources)
    reported = [f"{name}: {', '.join(files)}" for name, files in found.items() if name not in TWICE]
    assert not reported, "several meanings of one word; rename all but one:\n" + "\n".join(reported)
    assert not set(TWICE) - set(found), "exceptions that are needed no more"


def test_a_planted_double_is_found():
    classes = {"a.py": "class Place: ...", "b.py": "def f():\n    class Place: ..."}
    assert doubles(classes) == {"Place": ["a.py", "b.py"]}
    aliases = {"a.py": "Send = Callable[[int], None]", "b.py": "Send: TypeAlias = int"}
    assert doubles(aliases) == {"Send": ["a.py", "b.py"]}


def test_other_names_may_stand_twice():
    for each in ("class _Place: ...", "ModelT = TypeVar('ModelT')", "MOST = 1", "place = 1"):
        assert not doubles({"a.py": each, "b.py": each}), each
