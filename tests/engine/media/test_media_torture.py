"""A sample of the damaged files that ``torture/media_files.py`` tries at length."""

from __future__ import annotations

import random

import pytest

from torture.media_files import READERS, damaged, outcomes, whole_files

WHOLE = whole_files()


@pytest.mark.parametrize("name", WHOLE)
def test_damaged_files_are_read_or_refused(name: str) -> None:
    kind, content = WHOLE[name]
    READERS[kind](content)
    draw = random.Random(name)
    found = list(outcomes(kind, [damaged(content, draw) for _ in range(60)]))
    assert not [each for each in found if each[0] not in ("went on", "failed alone")]
