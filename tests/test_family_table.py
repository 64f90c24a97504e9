"""The table of families in the documentation states what passing tests show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.family_table import PAGE, marked_files, page_with, shown_by, table_of


def test_the_table_of_families_is_that_of_the_tests(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    options = request.config.option
    if options.keyword or options.markexpr or not marked_files() <= {item.path for item in items}:
        pytest.skip("not all tests are collected")
    expected = page_with(table_of(shown_by(items)))
    assert PAGE.read_text("utf-8") == expected, "python -m tests.support.family_table writes it"


def item(mark: pytest.MarkDecorator, **params: Any) -> Any:
    spec = SimpleNamespace(params=params)
    return SimpleNamespace(iter_markers=lambda _: [mark.mark], callspec=spec)


def test_parameters_say_of_which_family_and_in_which_format() -> None:
    shows = pytest.mark.shows
    shown = shown_by(
        [
            item(shows("parity"), name="qwen2 untied", budget=7),
            item(shows("streaming"), family=("t5-gated", "swap")),
            item(shows("formats"), name="qwen2", form="int8"),
            item(shows("layout", of="llava", layout="a/b-7b-hf"), hub_id="a/b-7b-hf"),
            item(shows("layout", of="llava", layout="a/b-13b-hf"), hub_id="a/b-13b-hf"),
            item(shows("images"), name="qwen2"),
            item(shows("parity"), name="another"),
        ]
    )
    assert shown["qwen2"] >= {"parity", "int8"} and "int4" not in shown["qwen2"]
    assert "streaming" in shown["t5"] and "another" not in shown
    rows = {line.split(" | ")[0]: line for line in table_of(shown).splitlines()}
    assert rows["| Qwen2"] == "| Qwen2 | ✓ |  |  | – | – |  | float32, int8 |  |"
    assert rows["| LLaVA"].endswith("| `a/b-13b-hf` |")
    assert rows["| Whisper"] == "| Whisper |  |  |  | – |  |  |  |  |"
