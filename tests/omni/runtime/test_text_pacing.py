"""Text may wait for more of it, or for sound, which never waits; none is lost."""

from __future__ import annotations

import queue
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import Waveform
from omni.requests.request import OmniOutput, OmniRequest
from omni.requests.stage_time import StageTime
from omni.runtime.driver import Driver
from omni.runtime.orchestrator import Orchestrator
from omni.runtime.text_pacing import TextPacing, check_gap
from stages import StageOutput
from tests.support.patience import PATIENCE_S

GAP_S = 4.0


class Paced:
    """Two requests' outputs, paced by a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pacing: TextPacing[str] = TextPacing(lambda: self.now)
        self.seen: list[OmniOutput] = []
        self.said: dict[str, str] = {}
        self.timelines: dict[str, tuple[StageTime, ...]] = {}

    def comes(
        self,
        more: str,
        *,
        asker: str = "r",
        gap_s: float = GAP_S,
        sound: bool = False,
        has_moved: bool = False,
        is_over: bool = False,
    ) -> None:
        text = self.said[asker] = self.said.get(asker, "") + more
        delta = Waveform(torch.zeros(1), 8) if sound else None
        stages = {
            "writer": StageOutput(asker, "writer", is_over, text=text, delta=more),
            "speaker": StageOutput(asker, "speaker", is_over, audio_delta=delta),
        }
        timeline: tuple[StageTime, ...] = ()
        if has_moved:
            timeline = (*self.timelines.get(asker, ()), StageTime("writer", 1.0))
            self.timelines[asker] = timeline
        output = OmniOutput(asker, stages, is_over, timeline=timeline)
        handed_on = self.pacing.admit(asker, gap_s, output)
        self.seen += [] if handed_on is None else [handed_on]

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.seen += self.pacing.due().values()

    def told(self, asker: str = "r") -> list[tuple[str | None, str]]:
        """The texts and the deltas of what was handed on."""
        writers = [each.stages["writer"] for each in self.seen if each.request_id == asker]
        return [(each.text, each.delta) for each in writers]


@pytest.fixture
def paced() -> Paced:
    return Paced()


def test_the_first_one_waits_for_nothing_and_text_after_it_does(paced: Paced) -> None:
    for more in "abc":
        paced.comes(more)
    assert paced.told() == [("a", "a")]
    paced.passes(GAP_S)
    assert paced.told() == [("a", "a"), ("abc", "bc")]
    paced.comes("d")
    assert len(paced.seen) == 2, "the next text waits again"
    paced.passes(2 * GAP_S)
    paced.passes(2 * GAP_S)
    paced.comes("e")
    assert paced.told()[2:] == [("abcd", "d"), ("abcde", "e")], "what comes late need not wait"


@pytest.mark.parametrize(
    "kind",
    [{"sound": True}, {"is_over": True}],
    ids=["sound", "its end"],
)
def test_sound_and_the_end_are_handed_on_at_once_and_what_was_kept_is_in_them(
    kind: dict[str, Any], paced: Paced
) -> None:
    paced.comes("a")
    paced.comes("b")
    paced.comes("c", **kind)
    assert paced.told() == [("a", "a"), ("abc", "bc")]
    paced.passes(10 * GAP_S)
    assert len(paced.seen) == 2, "it was handed on"


@pytest.mark.parametrize("end", [{"sound": True}, {"is_over": True}, {}])
def test_stages_that_it_entered_are_told_with_what_follows(
    end: dict[str, Any], paced: Paced
) -> None:
    paced.comes("a", has_moved=True)
    paced.comes("b", has_moved=True)
    paced.comes("c", **end)
    paced.passes(GAP_S)
    assert paced.told() == [("a", "a"), ("abc", "bc")]
    assert [len(each.timeline) for each in paced.seen] == [1, 2]


def test_no_output_without_text_makes_the_first_text_wait(paced: Paced) -> None:
    for more in ("", "", "a", "b"):
        paced.comes(more)
    assert paced.told() == [("", ""), ("", ""), ("a", "a")]


def test_who_has_gone_gets_nothing_and_nothing_is_waited_for(paced: Paced) -> None:
    paced.comes("a")
    paced.comes("b")
    assert [paced.pacing.time_to_due] == [GAP_S]
    paced.pacing.forget("r")
    assert [paced.pacing.time_to_due] == [None]
    paced.passes(10 * GAP_S)
    assert paced.told() == [("a", "a")]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["r", "q"]),
            st.sampled_from(["", "x", "yz"]),
            st.sampled_from([{}, {}, {}, {"sound": True}, {"has_moved": True}]),
            st.integers(0, 128).map(lambda sixteenths: sixteenths / 16),  # sums are exact
        )
    ),
    st.sampled_from([0.0, 0.5, GAP_S]),
)
def test_all_text_comes_once_in_order_and_none_waits_for_longer(
    acts: list[tuple[str, str, dict[str, bool], float]], gap_s: float
) -> None:
    paced = Paced()
    kept_since: dict[str, float] = {}
    for asker, more, kind, seconds in acts:
        before = len(paced.seen)
        paced.comes(more, asker=asker, gap_s=gap_s, **kind)
        assert len(paced.seen) > before or (gap_s and "sound" not in kind)
        for each in ("r", "q"):
            if not paced.told(each) or paced.told(each)[-1][0] == paced.said.get(each):
                kept_since.pop(each, None)
            else:
                kept_since.setdefault(each, paced.now)
        assert all(paced.now < since + gap_s for since in kept_since.values())
        due_s = paced.pacing.time_to_due
        assert (due_s is None) or 0 < due_s <= gap_s
        paced.passes(seconds if due_s is None else min(seconds, due_s))
        for each in list(kept_since):
            if paced.told(each)[-1][0] == paced.said[each]:
                del kept_since[each]
    for asker in paced.said:
        paced.comes("!", asker=asker, gap_s=gap_s, is_over=True)
        told = paced.told(asker)
        assert told[-1][0] == paced.said[asker]
        so_far = ""
        for text, delta in told:
            so_far += delta
            assert text == so_far
    assert paced.pacing.time_to_due is None
    sounds = [each for each in paced.seen if each.stages["speaker"].audio_delta is not None]
    assert len(sounds) == sum("sound" in kind for _, _, kind, _ in acts)
    for asker, timeline in paced.timelines.items():
        times = [each.timeline for each in paced.seen if each.request_id == asker and each.timeline]
        assert times[-1] == timeline and times == sorted(times, key=len), "all stays are told of"


@pytest.mark.parametrize("gap_s", [-1.0, float("nan"), float("inf"), "0.1"])
def test_what_is_no_number_of_seconds_is_refused(gap_s: Any) -> None:
    with pytest.raises(ValueError, match="text_gap_s must be a number of seconds.*, got"):
        check_gap(gap_s)


class _Silent:
    """An orchestrator whose one request says two words and then nothing, with nothing to do."""

    time_to_work = None

    def __init__(self) -> None:
        self._to_say = ["a", "ab"]

    def prepare_aside(self, on_news: object) -> None: ...

    def close(self) -> None: ...

    def add_request(self, request: OmniRequest, group: int | None) -> None: ...

    def abort(self, request_id: str, reason: str = "") -> None: ...

    @property
    def has_work(self) -> bool:
        return bool(self._to_say)

    def step(self) -> list[OmniOutput]:
        if not self._to_say:
            return []
        text = self._to_say.pop(0)
        return [OmniOutput("r", {"a": StageOutput("r", "a", False, text=text)}, False)]


def test_a_driver_that_has_nothing_to_do_hands_on_what_is_due() -> None:
    said: queue.SimpleQueue[object] = queue.SimpleQueue()
    driver = Driver(cast(Orchestrator, _Silent()))
    ticket = driver.submit(OmniRequest("x"), "r", said.put, text_gap_s=0.01)
    for text in ("a", "ab"):
        output = said.get(timeout=PATIENCE_S)
        assert isinstance(output, OmniOutput)
        assert output.stages["a"].text == text
    driver.discard([ticket])
    driver.stop()
    assert said.empty()
