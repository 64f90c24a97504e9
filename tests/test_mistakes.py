"""The page of mistakes shows the actual answer to each of them."""

from __future__ import annotations

import pytest

from docs.mistakes import MISTAKES, PAGE, Mistake, answer_to

EVERY = [mistake for group in MISTAKES.values() for mistake in group]


def test_there_are_at_least_the_25_likeliest() -> None:
    assert len(EVERY) >= 25


@pytest.mark.parametrize("mistake", EVERY, ids=lambda mistake: mistake.what)
@pytest.mark.usefixtures("checkpoint_cache")
def test_a_mistake_is_answered_as_the_page_says(mistake: Mistake) -> None:
    answer = answer_to(mistake)
    assert answer.text in PAGE.read_text("utf-8")
    assert "Traceback" not in answer.text and "pydantic" not in answer.text
    fails_alone = mistake in MISTAKES["In the file of requests"]
    assert answer.status == (1 if mistake.code or fails_alone else 2)
