"""The figures of a level, as vLLM's ``bench serve`` defines them."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict

import numpy as np
import pytest

from omni.commands.bench.load import (
    LevelRun,
    LoadLevel,
    MeasuredRequest,
    RequestFailure,
    Send,
    line_source,
)
from omni.commands.bench.report import Distribution, LevelReport, keeps_limits, parse_goodput
from tests.support.virtual_clock import run_virtually

SPOKEN = MeasuredRequest(
    scheduled=9.5,
    sent=10.0,
    ended=14.0,
    text_times=[10.5, 10.75, 11.5],
    first_audio_time=11.0,
    audio_s=8.0,
    prompt_tokens=100,
    cached_tokens=40,
    completion_tokens=6,
)


def test_times_of_a_request_start_when_it_is_sent():
    assert SPOKEN.send_delay == 0.5
    assert SPOKEN.first_token == 0.5
    assert SPOKEN.gaps == [0.25, 0.75] and SPOKEN.between_tokens == 0.5
    assert SPOKEN.per_token == 0.2, "1 s for the 5 tokens after the first"
    assert SPOKEN.first_audio == 1.0
    assert SPOKEN.end_to_end == 4.0
    assert SPOKEN.real_time_factor == 0.5


def test_absent_times_are_none_and_not_zero():
    silent = MeasuredRequest(scheduled=1.0, sent=1.0, ended=2.0)
    assert silent.end_to_end == 1.0
    assert silent.first_token is silent.first_audio is silent.real_time_factor is None
    assert silent.per_token is None and silent.gaps == []


def test_pieces_are_counted_without_token_counts():
    record = MeasuredRequest(scheduled=0.0, sent=0.0, ended=3.0, text_times=[1.0, 2.0, 3.0])
    assert record.num_tokens == 3 and record.per_token == 1.0


def test_percentiles_equal_those_of_numpy():
    values = np.random.default_rng(0).exponential(size=257)
    found = Distribution.of(iter(values.tolist()))
    assert found is not None and found.count == 257
    assert found.mean == pytest.approx(values.mean()) and found.max == values.max()
    for name in ("p50", "p90", "p99"):
        assert getattr(found, name) == np.percentile(values, int(name[1:]))


def test_two_values_are_interpolated_and_none_have_no_distribution():
    assert Distribution.of([1.0, 3.0]) == Distribution(2, 2.0, 2.0, 2.8, pytest.approx(2.98), 3.0)
    assert Distribution.of([]) is None


def speaking(*, fails: bool = False) -> Send:
    """After 1 s a token, after 2 and 4 more, after 5 the end; of 10 prompt tokens 4 are cached."""

    async def send(record: MeasuredRequest) -> str:
        record.send()
        for wait in (1.0, 1.0, 2.0):
            await asyncio.sleep(wait)
            record.text()
        record.audio(2.5)
        await asyncio.sleep(1.0)
        if fails:
            raise RequestFailure("cut off", "no end")
        record.usage(10, 4, 3)
        return "text"

    return send


def rejecting() -> Send:
    async def send(record: MeasuredRequest) -> str:
        record.send()
        await asyncio.sleep(0.25)
        raise RequestFailure("status 429", "full", is_rejection=True)

    return send


def speaking_in_pieces(*waits: float) -> Send:
    """Pieces of 1 s of sound, each after so many seconds."""

    async def send(record: MeasuredRequest) -> str:
        record.send()
        record.enter("thinker", 0.0)
        for wait in waits:
            await asyncio.sleep(wait)
            record.enter("talker", 0.5)
            record.audio(1.0)
        return ""

    return send


def run_of(sends: list[Send]) -> LevelRun:
    run = LevelRun(LoadLevel(concurrency=1), len(sends))
    run_virtually(run.run(line_source(sends)))
    return run


def test_a_level_summarizes_answers_and_counts_failures_by_kind(
    monkeypatch: pytest.MonkeyPatch,
):
    # Half of the time is spent on the CPU.
    monkeypatch.setattr(time, "process_time", lambda: asyncio.get_running_loop().time() / 2)
    sends = [speaking(), speaking(fails=True), rejecting(), speaking()]
    report = LevelReport.of(run_of(sends), {})
    assert report.duration_s == 5 + 5 + 0.25 + 5
    counts = report.requests
    assert (counts.ok, counts.rejected, counts.failed, counts.unfinished) == (2, 1, 1, 0)
    assert counts.failures == {"cut off": 1} and counts.examples == {"cut off": "no end"}
    assert (report.tokens.prompt, report.tokens.cached, report.tokens.output) == (20, 8, 6)
    assert report.tokens.hit_rate == 0.4 and not report.tokens.are_pieces
    assert report.audio_s == 5.0
    assert report.throughput_per_s == {
        "requests": 2 / 15.25,
        "output_tokens": 6 / 15.25,
        "total_tokens": 26 / 15.25,
        "audio_s": 5 / 15.25,
    }
    means = {name: each.mean for name, each in report.latencies.items()}
    assert means == {
        "first_token": 1.0,
        "between_tokens": 1.5,
        "per_token": 1.5,
        "first_audio": 4.0,
        "audio_gap": 0.0,
        "real_time_factor": 2.0,
        "end_to_end": 5.0,
    }
    assert report.latencies["between_tokens"].count == 4, "every gap of the two answers"
    assert report.rejection is not None and report.rejection.max == 0.25
    assert report.generator.cpu_share == 0.5


def test_an_audio_gap_is_the_longest_wait_of_a_player():
    # Before the third piece 2 s had been heard and 2.125 s had passed; the fourth comes early, and
    # what it leaves in store covers half of the wait for the fifth.
    sends = [
        speaking_in_pieces(5.0, 0.5, 1.625, 0.5, 1.5625),
        speaking_in_pieces(2.0, 1.0, 1.0),
        speaking_in_pieces(1.0, 1.0625),
        speaking_in_pieces(1.0, 2.0),
    ]
    run = run_of(sends)
    assert [each.audio_gap for each in run.records] == [0.125, 0.0, 0.0625, 1.0]
    report = LevelReport.of(run, {})
    assert report.continuity == {"C50": 0.25, "C100": 0.5, "C200": 0.75}
    starts = {name: each.p50 for name, each in report.stage_starts.items()}
    assert starts == {"thinker": 0.0, "talker": 1.0}, "the first entry counts"


def test_a_level_of_failures_has_no_times_and_can_be_written():
    report = LevelReport.of(run_of([rejecting()]), {"end_to_end": 9})
    assert report.latencies == {} and report.num_good == 0
    assert report.continuity == {} and report.stage_starts == {}
    written = json.loads(json.dumps(asdict(report), allow_nan=False))
    assert written["requests"]["rejected"] == 1 and written["throughput_per_s"]["requests"] == 0


@pytest.mark.parametrize(
    ("limits", "is_good"),
    [
        ({"first_token": 0.5}, True),
        ({"first_token": 0.49}, False),
        ({"between_tokens": 0.5, "per_token": 0.2, "end_to_end": 4.0}, True),
        ({"between_tokens": 0.4}, False),
        ({"per_token": 0.1}, False),
        ({"first_audio": 1.0, "real_time_factor": 0.5}, True),
        ({"real_time_factor": 0.4}, False),
    ],
)
def test_a_request_is_good_if_it_keeps_every_limit(limits: dict[str, float], is_good: bool):
    assert keeps_limits(SPOKEN, limits) is is_good


def test_one_token_keeps_limits_on_later_tokens_and_a_failure_keeps_none():
    one = MeasuredRequest(scheduled=0.0, sent=0.0, ended=1.0, text_times=[1.0], completion_tokens=1)
    assert keeps_limits(one, {"between_tokens": 0.0, "per_token": 0.0})
    assert not keeps_limits(one, {"first_audio": 9.0}), "it has no sound"
    failed = MeasuredRequest(scheduled=0.0, sent=0.0, ended=1.0, failure=RequestFailure("x", "y"))
    assert not keeps_limits(failed, {"end_to_end": 9.0})


def test_limits_are_parsed_by_measure():
    parsed = parse_goodput(" first_token=0.5, real_time_factor = 1")
    assert parsed == {"first_token": 0.5, "real_time_factor": 1.0}
