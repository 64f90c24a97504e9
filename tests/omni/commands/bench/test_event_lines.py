"""Server-sent events are found however the network cuts them."""

from __future__ import annotations

import random

import pytest

from omni.commands.bench.event_lines import EventLines

STREAM = (
    b": hello\n\ndata: one\n\ndata:two\ndata:  three\r\n\r\nevent: x\nid: 7\n\r"
    b"data: \xc3\xa9\r\rdata\n\ndata: \n\nretry: 5\ndata: [DONE]\n\n"
)
EVENTS = [b"one", b"two\n three", "é".encode(), b"", b"", b"[DONE]"]


def test_all_ends_of_lines_and_all_fields_are_known():
    assert [*EventLines().feed(STREAM)] == EVENTS


@pytest.mark.parametrize("seed", range(20))
def test_cutting_a_stream_anywhere_changes_nothing(seed: int):
    chance = random.Random(seed)
    found: list[bytes] = []
    lines, at = EventLines(), 0
    while at < len(STREAM):
        size = chance.choice((0, 1, 1, 2, 3, 9))
        found += lines.feed(STREAM[at : at + size])
        at += size
    assert found == EVENTS


def test_an_event_without_its_end_is_not_told():
    assert [*EventLines().feed(b"data: one\n\ndata: cut off\n")] == [b"one"]


def test_an_event_without_an_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("omni.commands.bench.event_lines._MOST_BYTES", 1000)
    for chunk in (b"x" * 100, b"data: " + b"x" * 90 + b"\n"):
        lines = EventLines()
        with pytest.raises(ValueError, match="longer than 1,000 bytes"):
            for _ in range(20):
                assert [*lines.feed(chunk)] == []
