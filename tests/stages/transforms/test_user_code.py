"""Users' transforms are found next to the pipeline's file, without running or shadowing modules."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engine import TokensPrompt
from stages import TransformContext, resolve_transform
from stages.transforms.registry import is_custom, locate_transform

BOMB = "raise SystemExit('this file was run')\n"
GOOD = (
    "from engine import TokensPrompt\ndef {name}(context):\n    return TokensPrompt(({number},))\n"
)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def made_by(spec: str) -> object:
    return resolve_transform(spec)(TransformContext("r", "prompt", ()))


def test_a_module_next_to_the_pipeline_is_found_without_running_it(tmp_path: Path):
    write(tmp_path, {"mine.py": BOMB + "def f(context): ...\n", "pack/age.py": BOMB + "f = str\n"})
    assert locate_transform("mine:f", tmp_path) == f"{tmp_path}/mine.py:f"
    assert locate_transform("pack.age:f", tmp_path) == f"{tmp_path}/pack/age.py:f"
    assert locate_transform("mine.py:f", tmp_path) == f"{tmp_path}/mine.py:f"
    located = locate_transform("mine:f", tmp_path)
    assert locate_transform(located, Path("/elsewhere")) == located, (
        "a located name is independent of the folder"
    )
    assert is_custom(located) and not is_custom("text_as_prompt")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine:g", r"'.*mine\.py' has no 'g'"),
        ("mine:functoin", "did you mean 'function'?"),
        ("absent:f", "'absent' is not beside the pipeline's file, in '.*', and not installed"),
        ("absent.py:f", "there is no file '.*absent.py'"),
        ("broken:f", "is no Python: "),
        ("deep:f", "is no Python: "),
        ("long:f", "has more than 1048576 bytes"),
        ("json.absent:f", "'json.absent' is .*not installed, though 'json' is"),
        ("bisect.absent:f", "'bisect.absent' is .*not installed, though 'bisect' is"),
        ("textwrap:indnt", "module 'textwrap' has no 'indnt'; did you mean 'indent'?"),
        ("../mine:f", "must have the form"),
        ("mine:", "must have the form"),
        (":f", "must have the form"),
        ("mine:f()", "must have the form"),
        ("a b:c", "must have the form"),
    ],
)
def test_a_missing_transform_is_reported_without_running_anything(
    spec: str, message: str, tmp_path: Path
):
    write(
        tmp_path,
        {
            "mine.py": BOMB + "def function(context): ...\n",
            "broken.py": "def",
            "deep.py": "x = " + "(" * 5000 + ")" * 5000,
            "long.py": "#" * 2**20 + "\n" + BOMB,
        },
    )
    with pytest.raises(ValueError, match=message):
        locate_transform(spec, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "from elsewhere import f",
        "from elsewhere import g as f",
        "from elsewhere import *",
        "f, g = 1, 2",
        "f: object = str",
        "try:\n    import f\nexcept ImportError:\n    f = None",
        "if True:\n    class f: ...",
        "def __getattr__(name): ...",
        "with open('x') as f: ...",
        "def f(x): ...\nf = str.strip",
        "def f(x): ...\nfrom elsewhere import *",
        "try:\n    from elsewhere import f\nexcept ImportError:\n    def f(x): ...",
        "f = None\ndef g():\n    global f\n    f = str\ng()",
        "f = None\nglobals()['f'] = str",
        "f = 1\nwhile 1:\n    f = str\n    break",
        "f = 1\nmatch str:\n    case f: ...",
        "f = 1\n(f := str)",
        "f, g = 1, str",
        "import f\nf = f.f",
        "import sys\nf = 1\nsys.modules[__name__] = str",
    ],
)
def test_names_are_found_however_a_module_defines_them(text: str, tmp_path: Path):
    write(tmp_path, {"mine.py": text})
    locate_transform("mine:f", tmp_path)


def test_modules_next_to_the_pipeline_shadow_no_installed_module(tmp_path: Path):
    write(
        tmp_path,
        {
            "json.py": "import json\n" + GOOD.format(name="f", number=1) + "loads = json.loads\n",
            "tabulate.py": BOMB,
        },
    )
    path = list(sys.path)
    spec = locate_transform("json:f", tmp_path)
    assert made_by(spec) == TokensPrompt((1,)), "the user's module, not the standard library's"
    assert sys.modules["json"] is json and sys.path == path
    theirs = sys.modules[resolve_transform(spec).__module__]
    assert theirs.loads is json.loads, "its imports find the installed module"


def test_equal_names_in_two_folders_are_two_modules(tmp_path: Path):
    specs = [
        locate_transform(
            "mine:f", write(tmp_path / name, {"mine.py": GOOD.format(name="f", number=number)})
        )
        for number, name in enumerate("ab")
    ]
    assert [made_by(spec) for spec in specs] == [TokensPrompt((0,)), TokensPrompt((1,))]


def test_modules_import_their_neighbours_relatively(tmp_path: Path):
    write(
        tmp_path,
        {
            "helper.py": GOOD.format(name="help", number=7),
            "mine.py": "from .helper import help as f\n",
            "bad.py": "import helper\ndef f(context): ...\n",
            "package/__init__.py": "",
            "package/inner/__init__.py": "",
            "package/inner/mod.py": "from ..other import f\n",
            "package/other.py": GOOD.format(name="f", number=8),
        },
    )
    assert made_by(locate_transform("mine:f", tmp_path)) == TokensPrompt((7,))
    assert made_by(locate_transform("package.inner.mod:f", tmp_path)) == TokensPrompt((8,))
    with pytest.raises(ValueError, match="No module named 'helper'; .* 'from . import helper'"):
        resolve_transform(locate_transform("bad:f", tmp_path))


@pytest.mark.parametrize(
    "spec",
    ["os:system", "builtins:print", "builtins:eval", "json:dumps", "time:sleep", "pathlib:Path"],
)
def test_installed_functions_that_are_no_transforms_are_refused(spec: str):
    with pytest.raises(ValueError, match="is no transform|must take exactly one argument"):
        resolve_transform(spec)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("def f(context): ...", True),
        ("from stages import TransformContext\ndef f(x: TransformContext): ...", True),
        ("import stages\ndef f(x: 'stages.TransformContext', more=1): ...", True),
        ("from stages import requires\n@requires()\ndef f(x): ...", True),
        ("from stages import chunkable\n@chunkable\ndef f(x): ...", True),
        ("class F:\n    def __call__(self, context): ...\nf = F()", True),
        ("f = lambda context: 'x'", True),
        ("if 0:\n    def f(x): ...\nelse:\n    def f(context): ...", True),
        ("from stages import TransformContext as Seen\ndef f(x: Seen, /, *more): ...", True),
        ("from stages import chunkable\ndef f(x): ...\nchunkable(f)", True),
        ("import os\nf = os.remove", False),
        ("def f(x): ...\nf = f", False),
        ("def f(x: 'str'): ...", False),
    ],
)
def test_only_functions_marked_as_transforms_are_accepted(text: str, is_one: bool, tmp_path: Path):
    spec = locate_transform("mine:f", write(tmp_path, {"mine.py": text}))
    if is_one:
        assert callable(resolve_transform(spec))
        return
    with pytest.raises(ValueError, match="no transform|exactly one argument|coroutine"):
        resolve_transform(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(x): ...", r"'.*mine.py:f' is no transform: .* this one takes x"),
        ("def f(command: str): ...", "no transform: .* this one takes command: str"),
        ("def f(x, /, y=1, *z, k=2, **more): ...", "no transform: .* this one takes x"),
        ("def f(*context_and_more): ...", "no transform: "),
        ("def f(context, other): ...", "exactly one argument, .*: missing a .* 'other'"),
        ("def f(): ...", "exactly one argument, .*: too many"),
        ("def f(*, context): ...", "exactly one argument, .*: too many"),
        ("async def f(context): ...", "is a coroutine function"),
        ("import os as f", "'.*:f' is a module, not a function"),
        ("f = 'text'", "is a str, not a function"),
    ],
)
def test_loaded_objects_that_are_no_transforms_are_refused(text: str, message: str, tmp_path: Path):
    located = locate_transform("mine:f", write(tmp_path, {"mine.py": text}))
    with pytest.raises(ValueError, match=message):
        resolve_transform(located)
