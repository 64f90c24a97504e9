"""Generates the table in ``docs/models.md`` of what tests show of each family.

    python -m tests.support.family_table      # runs those tests, and writes what passed

A mark states what a test shows. The family follows from the seeded models in its parameters, or
else from the mark::

    @pytest.mark.shows("parity", "hidden states")           of every family in its parameters
    @pytest.mark.shows("layout", of="qwen3_omni", layout="Qwen/Qwen3-Omni-30B-A3B-Instruct")

What is shown of images or sound counts for families that accept them. ``formats`` are the formats
in the parameters, in addition to float32, for which parity is shown.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.models.registry import FAMILIES
from tests.support.import_graph import ROOT

PAGE = ROOT / "docs" / "models.md"
_MARKS = re.compile(
    r"(?<=<!-- made by tests\.support\.family_table -->\n).*?(?=<!-- end -->)", re.S
)
_COLUMNS = ("parity", "hidden states", "prefix hits", "images", "audio", "streaming")
_FORMATS = ("bfloat16", "int8", "int4")
_NAMES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma-2",
    "gemma3": "Gemma-3",
    "qwen3_moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
    "jamba": "Jamba",
    "bamba": "Bamba",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5": "Qwen3.5 (text)",
    "bart": "BART",
    "t5": "T5",
    "whisper": "Whisper",
    "qwen3_asr": "Qwen3-ASR",
    "voxtral": "Voxtral",
    "mllama": "Mllama",
    "llava": "LLaVA",
    "gemma3_vision": "Gemma-3 with images",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_5_vision": "Qwen3.5",
    "qwen2_5_omni": "Qwen2.5-Omni",
    "qwen3_omni": "Qwen3-Omni",
    "csm": "CSM",
    "pocket_tts": "Pocket TTS",
}

Shown = Mapping[str, set[str]]
"""Names of columns, formats, and hub ids of layouts, by family."""


def marked_files() -> set[Path]:
    """Return the files that have tests with the mark."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {file for file in files if "pytest.mark.shows(" in file.read_text("utf-8")}


def shown_by(items: Iterable[pytest.Item]) -> Shown:
    """Return what some tests show if they pass."""
    shown: dict[str, set[str]] = defaultdict(set)
    for item in items:
        values = _words(getattr(item, "callspec", None))
        for mark in item.iter_markers("shows"):
            reported = {*mark.args, mark.kwargs.get("layout", "")}
            reported |= set(_FORMATS) & values if "formats" in reported else set()
            for family in {mark.kwargs["of"]} if "of" in mark.kwargs else values & set(_NAMES):
                shown[family] |= reported
    return shown


def _words(callspec: Any) -> set[str]:
    """First words of a test's parameters, also within tuples: ``qwen2`` of ``qwen2-sliding``."""
    given = [] if callspec is None else list(callspec.params.values())
    flat = [each for value in given for each in (value if isinstance(value, tuple) else (value,))]
    return {re.split(r"[ -]", each)[0] for each in flat if isinstance(each, str)}


def _modalities() -> Mapping[str, set[str]]:
    """Return the modalities of each family's prompts, over all its parts."""
    taken: dict[str, set[str]] = defaultdict(set)
    for row in FAMILIES.rows.values():
        if row.makes_sound:  # from the output of another model of the family
            continue
        family = row.name if row.whole is None else row.whole.removesuffix("_moe")
        taken[family] |= set(row.modalities)
    if taken.keys() != _NAMES.keys():
        raise ValueError(f"name in _NAMES what the table has: {taken.keys() ^ _NAMES.keys()}")
    return taken


def _billions(hub_id: str) -> float:
    """Return the number of parameters according to the name."""
    return float((*re.findall(r"(\d+(?:\.\d+)?)[Bb]", hub_id), 0)[0])


def table_of(shown: Shown) -> str:
    """Return the table in Markdown."""
    lines = [
        f"| family | {' | '.join(_COLUMNS)} | formats | largest published layout |",
        f"|---|{'---|' * (len(_COLUMNS) + 2)}",
    ]
    modalities = _modalities()
    for family, name in _NAMES.items():
        reported = shown.get(family, set())
        lacks = {"images": "image", "audio": "audio"}
        cells = [
            "–"
            if column in lacks and lacks[column] not in modalities[family]
            else "✓" * (column in reported)
            for column in _COLUMNS
        ]
        formats = ["float32"] * ("parity" in reported) + [
            each for each in _FORMATS if each in reported
        ]
        layouts = [each for each in reported if "/" in each]
        largest = f"`{max(layouts, key=_billions)}`" if layouts else ""
        lines.append(f"| {' | '.join([name, *cells, ', '.join(formats), largest])} |")
    return "\n".join(lines) + "\n"


def page_with(table: str) -> str:
    """Return the page with this table between its markers."""
    page = PAGE.read_text("utf-8")
    if not _MARKS.search(page):
        raise ValueError(f"{PAGE} lacks the marks between which the table stands")
    return _MARKS.sub(lambda _: table, page)


class _Passed:
    """Records the tests of a run that passed."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []
        self._passed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = list(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    @property
    def passed(self) -> list[pytest.Item]:
        return [item for item in self.items if item.nodeid in self._passed]


if __name__ == "__main__":
    run = _Passed()
    files = sorted(map(str, marked_files()))
    status = pytest.main(["-q", "-m", "shows", *files], plugins=[run])
    PAGE.write_text(page_with(table_of(shown_by(run.passed))), "utf-8")
    sys.exit(status)
