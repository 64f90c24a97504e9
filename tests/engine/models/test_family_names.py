"""Model families are named only in their own folders: in code, docstrings and comments."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

import pytest

from engine.models.registry import FAMILIES, FamilyRow
from tests.support.import_graph import ROOT

PACKAGES = ("prefix_cache", "engine", "stages", "omni")
MODELS = ROOT / "engine/models"
EXEMPT = {
    MODELS / "registry.py": "the table that lists the families",
    ROOT / "engine/checkpoints/gguf_checkpoint.py": "names llama.cpp, and a rope type by its name",
    ROOT / "stages/transforms/speech.py": "hands on what models that speak are made of",
    ROOT / "omni/seeded": "writes checkpoints of all families, by transformers' names of them",
    ROOT / "omni/commands/cli.py": "has a command that converts one family's checkpoints",
    ROOT / "omni/commands/demo.py": "shows a shipped pipeline, and its stages by name",
    ROOT / "omni/pipelines/pipeline_config.py": "names formats of tool calls as the field does",
    ROOT / "omni/server/openai/tools.py": "the same, and reads them",
}
NO_NAMES = {"decoders", "families", "hybrids", "hybrid", "seq2seq", "codec"}
"""Folders and files shared by several families."""


def modules_of(row: FamilyRow) -> list[str]:
    """Return the family's folder under ``engine.models``, and its module there."""
    place = row.build or row.generator or row.decoder_config
    assert place is not None
    return place.partition(":")[0].split(".")[1:]


def names_in(folders: Iterable[str] | None = None) -> set[str]:
    """Return family names without generation, such as qwen, of some folders or all."""
    wanted = None if folders is None else set(folders)
    words = {
        word.lower()
        for row in FAMILIES.rows.values()
        if wanted is None or modules_of(row)[0] in wanted
        for word in (*modules_of(row), row.name)
    } - NO_NAMES
    # The number in some names, such as t5, is not a generation.
    return {re.sub(r"(\d_.*|\d)$", "", word) if word not in {"t5"} else word for word in words}


def pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Match names as words in any case, and as parts of names such as ``OmniTalkerModel``."""
    small = "|".join(sorted(names, key=len, reverse=True))
    large = "|".join(sorted({n.capitalize() for n in names} | {n.upper() for n in names}))
    return re.compile(rf"(?:(?<![a-zA-Z])(?:{small})|(?:{large}))(?![a-z])")


def found_in(source: str, allowed: Iterable[str] = ()) -> list[str]:
    """Return the lines that name a family, except names imported from transformers or stages."""
    named, may = pattern(names_in()), set(allowed)
    # Most files contain no such word, and need no parsing.
    if not {hit.lower() for hit in named.findall(source)} - may:
        return []
    imported = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith(("transformers", "stages.transforms"))
        for alias in node.names
    }
    lines = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        # Imports from these modules may use their names.
        if token.string.strip("\"'") in imported or token.line.startswith(
            ("from transformers", "from stages.transforms")
        ):
            continue
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT) or (
            tokenize.tok_name[token.type] == "FSTRING_MIDDLE"
        ):
            for number, line in enumerate(token.string.split("\n"), token.start[0]):
                if {hit.lower() for hit in named.findall(line)} - may:
                    lines.append(f"{number}: {line.strip()}")
    return lines


def own_names(file: Path) -> set[str]:
    """Return the names allowed in a file: those of its folder, and of the folders it imports."""
    if MODELS not in file.parents or file.parent == MODELS:
        return set()
    text = file.read_text("utf-8")
    return names_in({file.parent.name, *re.findall(r"engine\.models\.(\w+)[. ]", text)})


def test_no_family_is_named_outside_its_folder() -> None:
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            if not EXEMPT.keys() & {file, *file.parents}:
                where = str(file.relative_to(ROOT))
                found += [f"{where}:{line}" for line in found_in(file.read_text(), own_names(file))]
    assert not found, "\n".join(found)


def test_the_names_are_those_of_the_table() -> None:
    assert {"llama", "gemma", "qwen", "whisper", "t5", "talker", "code2wav"} <= names_in()
    assert names_in({"whisper"}) == {"whisper"}
    assert all(file.exists() for file in EXEMPT)


@pytest.mark.parametrize(
    "planted",
    [
        "from engine.models.decoders.families import llama_config",
        "import engine.models.whisper.whisper",
        "isinstance(model, Qwen2_5OmniTalker)",
        "model.llama_layers",
        "PARTS = {'qwen2_5_omni': 1}",
        "def load_t5(): ...",
        '"""As Llama does it."""',
        "x = 1  # what Gemma-2 stores",
        "raise ValueError(f'only {a} of T5 has it')",
        '"""One.\n\nLike BART."""',
        "LLAVA = 3",
    ],
)
def test_a_planted_family_is_found(planted: str) -> None:
    assert found_in(planted)


def test_other_words_are_not_found() -> None:
    assert not found_in('"""Mamba, ALiBi, a llamas\' herd, Bartholomew, whispers, start5."""')
    theirs = "from transformers import WhisperConfig\ndef f(x: WhisperConfig): ..."
    assert not found_in(theirs), "what transformers calls its own"
    assert not found_in("from engine.models.whisper.whisper import RULE", {"whisper"})
    assert found_in("import engine.models.whisper.whisper", {"llama"})
