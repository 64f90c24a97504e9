"""The documentation's pages are accurate. ``make lint`` checks their links."""

from __future__ import annotations

import importlib
import json
import math
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config

import omni
from docs.docstring_roles import as_markdown
from docs.yaml_reference import EXAMPLE, PAGE, SCHEMA_FILE, page, schema_text
from omni.commands.cli import app
from omni.pipelines.config_file import shipped_configs
from omni.pipelines.pipeline_config import PipelineConfig
from tests.support.import_graph import LAYERS, ROOT, modules, public_names
from tests.support.pages import PAGES, README, commands, snippets

DOCS = ROOT / "docs"
REWRITE = "python -m docs.yaml_reference writes both anew"


def test_the_yaml_reference_is_current() -> None:
    assert PAGE.read_text("utf-8") == page(), REWRITE


def test_the_schema_for_editors_is_current() -> None:
    assert SCHEMA_FILE.read_text("utf-8") == schema_text(), REWRITE


@pytest.mark.parametrize("name", shipped_configs())
def test_a_shipped_pipeline_names_the_schema_for_editors(name: str) -> None:
    first, *_ = Path(ROOT, "stage_configs", f"{name}.yaml").read_text("utf-8").splitlines()
    assert first == f"# yaml-language-server: $schema={SCHEMA_FILE.name}"


def test_every_page_is_in_the_contents_once() -> None:
    listed = re.findall(r"^  - .+: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert sorted(listed) == [each.name for each in PAGES]


def test_the_python_reference_has_all_that_is_exported() -> None:
    message = re.findall(r"^::: omni\.(\w+)$", (DOCS / "python.md").read_text("utf-8"), re.M)
    assert sorted(message) == public_names(omni)


def test_every_page_but_those_that_are_included_begins_with_an_example() -> None:
    for each in PAGES:
        if each.name in {"mistakes.md", "benchmarks.md"}:
            continue
        _, first, *_ = re.split(r"\n{2,}", each.read_text("utf-8"))
        assert first.startswith("```"), each.name


@pytest.mark.parametrize(("file", "block"), snippets("yaml"))
def test_a_pipeline_in_a_page_is_valid(file: str, block: str, tmp_path: Path) -> None:
    config = tmp_path / "pipeline.yaml"
    config.write_text(block)
    assert PipelineConfig.load(config).name == yaml.safe_load(block)["name"]


def test_the_example_of_the_reference_is_that_of_the_readme() -> None:
    assert EXAMPLE.partition("\n")[2] in README.read_text("utf-8")


@pytest.mark.parametrize(
    ("file", "block"),
    [
        each
        for each in snippets("python")
        if each[0] in {"index.md", "python.md", "caches.md", "placement.md"}
    ],
)
@pytest.mark.usefixtures("checkpoint_cache")
def test_python_in_a_page_runs(file: str, block: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(block)
    runpy.run_path(str(script))


@pytest.mark.parametrize(("file", "block"), snippets("python"))
def test_what_a_page_imports_of_ours_is_there(file: str, block: str) -> None:
    for module, names in re.findall(
        r"^from ((?:omni|engine|stages)[\w.]*) import (.+)$", block, re.M
    ):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{file}: {module}.{name}"


def test_what_is_to_be_installed_is_there() -> None:
    """From a checkout, and with existing extras: no index has the package."""
    files = [README, *PAGES, *(file for each in LAYERS for file in modules(each))]
    text = "\n".join(file.read_text("utf-8") for file in files)
    assert "omni-pipeline[" not in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = set(re.findall(r"pip install -e '\.\[(\w+)\]'", text))
    assert {"bench", "otel", "ray", "serve"} <= asked <= set(project["optional-dependencies"])
    assert "urls" not in project  # there is no home page yet


@pytest.mark.parametrize("command", [each for each in commands() if each.startswith("omni ")])
def test_a_command_in_a_page_has_those_arguments(command: str) -> None:
    _, name, *arguments = shlex.split(command)
    group = typer.main.get_command(app)
    group.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("docstring", "message"),
    [
        ("See :class:`~stages.stage.Stage`.", "See `Stage`."),
        ("See :func:`engine.add` and ``x``.", "See `engine.add` and `x`."),
        ("Like this::\n\n    a = 1", "Like this:\n\n    a = 1"),
        ("First.\n\n>>> a\n... b\n\nThen.", "First.\n\n```pycon\n>>> a\n... b\n```\n\nThen."),
        ("from a::b and a: b", "from a::b and a: b"),
    ],
)
def test_docstrings_become_markdown(docstring: str, message: str) -> None:
    assert as_markdown(docstring) == message


def anchors(file: Path) -> set[str]:
    """Return the anchors of a Markdown file that links may name."""
    headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.M)
    named = {name for each in headings for name in re.findall(r"\{#([\w-]+)\}", each)}
    return named | {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize(
    "name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
)
def test_a_link_of_a_page_outside_the_site_has_a_target(name: str) -> None:
    """``mkdocs build --strict`` checks only links of the site's own pages."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / name).read_text("utf-8")):
        file, _, anchor = target.partition("#")
        page = ROOT / (file or name)
        assert page.exists(), f"{name} links to {target}"
        assert not anchor or anchor in anchors(page), f"{name} links to {target}"


@pytest.fixture(scope="module")
def search_index(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return the sections that the site's search indexes, except docstrings."""
    site = tmp_path_factory.mktemp("site")
    config = str(ROOT / "mkdocs.yml")
    build(load_config(config, plugins=["search"], site_dir=str(site), strict=False))
    return json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]


def found_first(question: str, sections: list[dict[str, str]]) -> str:
    """Return the page of the section with the question's rarest words; titles count 1000-fold."""

    def words(text: str) -> set[str]:
        return set(re.findall(r"[a-z0-9_.]+[a-z0-9]|[a-z]", text.lower()))

    texts = [(words(each["title"]), words(each["text"])) for each in sections]
    scores = [0.0] * len(sections)
    for word in words(question):
        weight = math.log(len(texts) / (1 + sum(word in a or word in b for a, b in texts)))
        for index, (title, text) in enumerate(texts):
            scores[index] += weight * (1000 * (word in title) + (word in text))
    best = max(range(len(sections)), key=scores.__getitem__)
    return sections[best]["location"].partition("/")[0]


@pytest.mark.parametrize(
    ("question", "page"),
    [
        ("Serve Qwen2.5-Omni on one machine with two GPUs", "qwen_two_gpus"),
        ("How do I serve Qwen2.5-Omni on two GPUs?", "qwen_two_gpus"),
        ("Why did my prefix not hit?", "prefix_misses"),
        ("A voice assistant step by step", "voice_assistant"),
        ("How do I build a voice assistant?", "voice_assistant"),
        ("exit statuses", "cli"),
        ("environment variables", "cli"),
        ("resume an interrupted run", "requests"),
        ("fixed limits", "limits"),
        ("What is code?", "security"),
        ("Adding a model", "models"),
    ],
)
def test_the_search_finds_a_page_by_its_question(
    question: str, page: str, search_index: list[dict[str, str]]
) -> None:
    assert found_first(question, search_index) == page
