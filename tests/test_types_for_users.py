"""A user's type checker sees the types of the installed packages, and finds mistakes by them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import engine
import omni
import prefix_cache
import stages
from tests.support.import_graph import ROOT, public_names

pytest.importorskip("mypy", reason="types are checked where mypy is installed")

PACKAGES = (engine, omni, prefix_cache, stages)

# Third-party code is skipped, which saves most of the time.
SETTINGS = """\
[mypy]
strict = true
[mypy-torch.*,transformers.*,tokenizers.*,huggingface_hub.*,numpy.*,PIL.*,safetensors.*,soundfile.*]
follow_imports = skip
ignore_missing_imports = true
"""

# Each line's comment gives its revealed type or its error.
MINE = """\
from omni import (
    AutoregressiveStage,
    EngineConfig,
    LLMEngine,
    Omni,
    OmniRequest,
    Pipeline,
    Prompt,
    SamplingParams,
    StageInputs,
    TransformContext,
    requires,
    verify,
)
from omni.testing import assert_cached_equals_uncached


@requires("hidden_states", num_sources=1)
def shout(context: TransformContext) -> Prompt:
    return (context.sources[0].text or "").upper()


config = EngineConfig(model="seeded:qwen2", num_blocks=64)
writer = AutoregressiveStage("writer", config, sampling=SamplingParams(max_tokens=3))
reader = AutoregressiveStage("reader", config, inputs=StageInputs(("writer",), shout))
with Omni(Pipeline([writer, reader])) as pipeline:
    outputs = pipeline.generate(["x", OmniRequest("y")])
    reveal_type(outputs)  # list[omni.requests.request.OmniOutput]
    reveal_type(outputs[0].stages["writer"].text)  # str | None
    reveal_type(outputs[0].stages["writer"].completions[0].token_ids)  # tuple[int, ...]
    reveal_type(verify(pipeline, "x").has_hits)  # bool
    reveal_type(pipeline.stats()["writer"].num_steps)  # int
    pipeline.generate(3)  # wrong: arg-type
    outputs[0].stage  # wrong: attr-defined
reveal_type(LLMEngine(config).generate("x")[0].outputs[0].text)  # str
reveal_type(assert_cached_equals_uncached("two_step", "x").equal)  # bool
EngineConfig(model=3)  # wrong: arg-type
EngineConfig(modle="x")  # wrong: call-arg
SamplingParams(max_tokens="3")  # wrong: arg-type
StageInputs("writer", shout)  # wrong: arg-type
"""


def install(folder: Path) -> None:
    """Copy what ``pyproject.toml`` installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    for package in project["packages"]:
        source, target = (root / package.replace(".", "/") for root in (ROOT, folder))
        target.mkdir(parents=True)
        for pattern in ("*.py", *project["package-data"].get(package, ())):
            for file in filter(Path.is_file, source.glob(pattern)):
                target_file = target / file.relative_to(source)
                target_file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target_file)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install(folder)
    return folder


def findings(
    site: Path, folder: Path, text: str, python: str = sys.executable
) -> dict[int, list[str]]:
    """Return mypy's messages for each line of a user's file; the site's cache is next to it."""
    (folder / "mine.py").write_text(text)
    (folder / "mypy.ini").write_text(SETTINGS)
    checked = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", "mypy.ini"),
            *("--cache-dir", str(site.with_name("mypy_cache")), "--python-executable", python),
            "mine.py",
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(site) if python == sys.executable else ""},
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[int, list[str]] = {}
    for line in checked.stdout.splitlines():
        match = re.fullmatch(r"mine\.py:(\d+): (.*)", line)
        if match is not None:
            found.setdefault(int(match[1]), []).append(match[2])
    assert checked.returncode in (0, 1) and "errors prevented" not in checked.stdout, checked
    return found


def test_a_users_file_is_checked_with_our_types(site: Path, tmp_path: Path) -> None:
    found = findings(site, tmp_path, MINE)
    for number, line in enumerate(MINE.splitlines(), start=1):
        said = "\n".join(found.pop(number, []))
        _, _, expected = line.partition("  # ")
        if expected.startswith("wrong: "):
            assert said.endswith(f"[{expected.removeprefix('wrong: ')}]"), (line, said)
        elif expected:
            assert said == f'note: Revealed type is "{expected}"', line
        else:
            assert not said, (line, said)
    assert not found


def test_an_editable_install_shows_its_types(site: Path, tmp_path: Path) -> None:
    """Type checkers read ``.pth`` files and no import hooks, which is what setuptools may write."""
    checkout, python = tmp_path / "checkout", tmp_path / "venv" / "bin" / "python"
    shutil.copytree(site, checkout)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # Its dependencies, and setuptools; a .pth of there is not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["install", "--no-deps", "--no-index", "--no-build-isolation", "--editable"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "--quiet", *install, str(checkout)],
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ""},
    )
    found = findings(tmp_path, tmp_path, "import omni\nreveal_type(omni.Omni)\n", str(python))
    ((line, (said,)),) = found.items()
    assert line == 2 and said.startswith('note: Revealed type is "def (') and "Omni" in said


def test_no_public_name_has_an_uninformative_type(site: Path, tmp_path: Path) -> None:
    names = [f"{package.__name__}.{name}" for package in PACKAGES for name in public_names(package)]
    lines = [f"import {package.__name__}" for package in PACKAGES]
    lines += [f"reveal_type({name})" for name in names]
    found = findings(site, tmp_path, "\n".join(lines) + "\n")
    for number, name in enumerate(names, start=len(PACKAGES) + 1):
        (said,) = found.pop(number)
        assert said.startswith("note: Revealed type is ") and '"Any"' not in said, (name, said)
    assert not found


def test_without_the_mark_nothing_is_seen(site: Path, tmp_path: Path) -> None:
    """Shows that the tests above can fail."""
    unmarked, python = tmp_path / "site", tmp_path / "venv" / "bin" / "python"
    shutil.copytree(site, unmarked)
    (unmarked / "omni" / "py.typed").unlink()
    venv.create(tmp_path / "venv")  # the environment of the tests may show the checkout's types
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "unmarked.pth").write_text(f"{unmarked}\n")
    found = findings(tmp_path, tmp_path, MINE, str(python))
    assert "missing library stubs or py.typed marker" in found[1][0]
