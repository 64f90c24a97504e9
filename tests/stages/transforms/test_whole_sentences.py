"""Text is passed on in whole sentences, each as soon as its end is certain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import TextPrompt
from stages import StageOutput
from stages.stage import TransformContext
from stages.transforms.prompts import whole_sentences


def passed_on(text: str, *, is_last: bool = False) -> str:
    source = StageOutput("r", "writer", is_last, text=text)
    context = TransformContext("r", TextPrompt("?"), (source,), "Ada", is_last=is_last)
    chunk = whole_sentences(context)
    assert chunk.is_last is is_last and chunk.speaker == "Ada"
    return chunk.text


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("Hello there. How", "Hello there."),
        ("Hello there.", ""),  # 3.14 might follow
        ("It is 3.5 m. Really", "It is 3.5 m."),
        ("Dr. Who met J. Smith, i.e. him. So", "Dr. Who met J. Smith, i.e. him."),
        ('He said "no!" Then', 'He said "no!"'),
        ("Wait… what?! Well", "Wait… what?!"),
        ("1. Water\n2. Fire", "1. Water\n"),
        ("你好。我", "你好。"),
        ("no end at all", ""),
    ],
)
def test_complete_sentences_are_passed_on(text: str, whole: str):
    assert passed_on(text) == whole
    assert passed_on(text, is_last=True) == text


@given(st.text(alphabet="aB1.!?… \n\"'。", max_size=40))
def test_text_passed_on_is_never_retracted(text: str):
    before = ""
    for end in range(len(text) + 1):
        now = passed_on(text[:end])
        assert now.startswith(before) and text.startswith(now)
        before = now
    assert passed_on(text, is_last=True) == text
