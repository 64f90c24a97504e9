"""``make`` picks the right Python; lint run next to the tests is neither lost nor in the way."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.import_graph import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

WORKS = "exit 0"
DOES_NOT_RUN = "echo 'command not found' >&2; exit 127"
HAS_NO_VENV = 'case "$2" in *venv*) exit 1;; esac'
IS_OLD = 'case "$2" in *version_info*) exit 1;; esac'


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def make(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the repository's Makefile, with ``path`` as the only folder of programs."""
    outer = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "PYTHON", "WORKERS"}
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    if path is not None:
        path.mkdir(exist_ok=True)
        for tool in ("sed", "sh"):
            (path / tool).symlink_to(str(shutil.which(tool)))
        environment["PATH"] = str(path)
    command = [str(shutil.which("make")), "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"python3.13": WORKS, "python3.12": WORKS, "python3.11": WORKS}, "python3.13"),
        ({"python3.12": WORKS, "python3.11": WORKS}, "python3.12"),
        ({"python3.11": WORKS, "python3.14": WORKS, "python3": WORKS}, "python3.11"),
        (
            {"python3.13": DOES_NOT_RUN, "python3.12": HAS_NO_VENV, "python3.11": WORKS},
            "python3.11",
        ),
        ({"python3.13": IS_OLD, "python3.12": WORKS}, "python3.12"),
    ],
    ids=["all", "two", "one", "two that do not work", "one of another version"],
)
def test_the_first_python_that_works_is_taken(there: dict[str, str], taken: str, tmp_path: Path):
    for name, body in there.items():
        script(tmp_path / "bin" / name, body)
    done = make("which-python", path=tmp_path / "bin")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{taken}\n", "")


def test_the_python_that_is_named_is_taken_and_no_other(tmp_path: Path):
    programs = tmp_path / "bin"
    script(programs / "python3.13", WORKS)
    script(tmp_path / "mine", WORKS)
    done = make("which-python", f"PYTHON={tmp_path}/mine", path=programs)
    assert done.stdout == f"{tmp_path}/mine\n"
    script(tmp_path / "mine", HAS_NO_VENV)
    done = make("which-python", f"PYTHON={tmp_path}/mine")
    assert done.returncode and done.stdout == ""
    assert f"PYTHON={tmp_path}/mine cannot build .venv" in done.stderr
    assert "venv or ensurepip is missing" in done.stderr


def test_without_a_python_the_missing_one_is_named(tmp_path: Path):
    script(tmp_path / "bin" / "python3.13", DOES_NOT_RUN)
    script(tmp_path / "bin" / "python3.12", HAS_NO_VENV)
    done = make("which-python", path=tmp_path / "bin")
    assert done.returncode and done.stdout == ""
    assert done.stderr.splitlines()[:5] == [
        "No Python here can build .venv; "
        "expected one of python3.13 python3.12 python3.11, with venv.",
        "  python3.13: found, but it does not run",
        "  python3.12: found, but venv or ensurepip is missing "
        "(on Debian and Ubuntu: apt install python3.12-venv)",
        "  python3.11: not found",
        "Install one, or name one that is elsewhere: make PYTHON=/path/to/python3.11 test",
    ]


def test_the_environment_is_built_with_it(tmp_path: Path):
    programs = tmp_path / "bin"
    script(programs / "python3.12", f'test "$2" != venv || echo "$*" > {tmp_path}/asked; exit 0')
    done = make(f"VENV={tmp_path}/env", "install", path=programs)
    # The expected environment does not exist: the next command of the recipe fails.
    assert done.returncode
    assert (tmp_path / "asked").read_text() == f"-m venv {tmp_path}/env\n"


def installs(folder: Path, target: str) -> list[str]:
    """Return pip's arguments for a target in a folder whose Python only prints its arguments."""
    script(folder / "env" / "bin" / "python", f'echo "$@" >> {folder}/asked')
    script(folder / "env" / "bin" / "omni", "echo an answer")
    done = make(f"VENV={folder}/env", target)
    assert done.returncode == 0, done.stderr
    asked = (folder / "asked").read_text().splitlines()
    assert all("--quiet" in each for each in asked)
    assert len(done.stdout.splitlines()) < 10
    return [each.split()[-1] for each in asked]


def test_the_demo_installs_what_it_needs_and_no_more_and_torch_first(tmp_path: Path):
    torch, *rest = installs(tmp_path, "run")
    assert torch.startswith("torch==") and rest == ["."]
    (tmp_path / "asked").unlink()
    assert installs(tmp_path, "install") == [".[dev]"]


def tools(folder: Path, *, ruff: str = WORKS, mypy: str = WORKS, python: str = WORKS) -> str:
    """Create an installed environment of fakes."""
    for name, body in {"ruff": ruff, "mypy": mypy, "python": python}.items():
        script(folder / "bin" / name, body)
    (folder / ".omni").touch()
    (folder / ".installed").touch()
    return f"VENV={folder}"


def test_the_last_line_of_make_test_is_that_of_pytest(tmp_path: Path):
    environment = tools(tmp_path, mypy="echo no issues", python="echo '...'; echo '3 passed'")
    done = make(environment, "test")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "3 passed"


@pytest.mark.parametrize("target", ["lint", "docs"])
def test_a_link_of_the_documentation_that_leads_nowhere_fails(target: str, tmp_path: Path):
    """--strict makes it an error, and --quiet would undo that."""
    reported = (
        'echo "$*" >> ' + str(tmp_path / "asked") + '; case "$*" in *--strict*) exit 1;; esac'
    )
    done = make(tools(tmp_path, python=reported), target)
    assert done.returncode
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.startswith("-m mkdocs build --strict") and "--quiet" not in asked


@pytest.mark.parametrize("tool", ["ruff", "mypy", "python"])
def test_a_failure_in_make_test_is_reported_and_fails_it(tool: str, tmp_path: Path):
    bodies = {"python": "echo '3 passed'"} | {tool: f"echo {tool} found something; exit 1"}
    done = make(tools(tmp_path, **bodies), "test")
    assert done.returncode
    assert f"{tool} found something" in done.stdout
    assert tool == "python" or "3 passed" in done.stdout
