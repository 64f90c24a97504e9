"""Any error in a streamed pipeline ends every request once, and no stage keeps it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import strategies as st

from engine import CodecPrompt, FinishReason, Prompt
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniOutput, OmniRequest
from stages import TransformContext, chunkable, talker_to_code2wav, thinker_to_talker
from tests.support.fake_speech import Vocoder
from tests.support.placed import Anywhere, everywhere, over_every_transport
from tests.support.settled_stages import assert_settled, refusal
from tests.support.speech_pipeline import (
    PROMPTS,
    drain,
    run,
    speech_stages,
    start,
    text_and_sound,
    whole,
)
from tests.support.whole_orchestrator import WholeOrchestrator

FAIL, EXPLODE = {"fail": {"x": 3}}, {"explode": {"x": 3}}


@everywhere
@pytest.mark.parametrize(
    ("where", "what", "message"),
    [
        *((where, FAIL, "told to fail") for where in ("thinker", "talker", "code2wav")),
        *((where, EXPLODE, "its step failed: Ari") for where in ("thinker", "talker", "code2wav")),
        *((where, {"refuse": {"x": 0}}, "refused") for where in ("talker", "code2wav")),
        *((where, {"refuse": {"x": 2}}, "refused") for where in ("talker", "code2wav")),
    ],
)
def test_a_request_that_dies_in_one_stage_is_freed_in_all(
    where: str, what: dict[str, Any], message: str
) -> None:
    stages = speech_stages((1, 1), **{where: what})
    beside: dict[str, str] = {} if "explode" in what else {"y": PROMPTS["y"], "z": PROMPTS["z"]}
    last = run(stages, {"x": PROMPTS["x"], **beside})
    assert f"stage {where!r}: {message}" in str(last["x"].error)
    assert last["x"].stages["code2wav"].finish_reason is FinishReason.ERROR
    for request_id in beside:
        assert text_and_sound(last[request_id]) == text_and_sound(whole()[request_id])


@everywhere
@pytest.mark.parametrize("turns", range(0, 40, 3))
def test_an_abort_frees_all_stages_and_leaves_the_others(turns: int) -> None:
    vocoder = {"steps_per_token": 3, "max_pending": 1, "endless": ["z"]}
    stages = speech_stages((1, 2), code2wav=vocoder)
    orchestrator = start(stages)
    outputs = [output for _ in range(turns) for output in orchestrator.step()]
    output = orchestrator.abort("z")
    assert output is not None and output.error == "aborted"
    outputs += chain.from_iterable(drain(orchestrator).values())
    assert_settled(stages)
    last = {output.request_id: output for output in outputs if output.finished}
    assert sorted(last) == ["x", "y"], "nothing follows the end"
    for request_id, theirs in whole().items():
        assert request_id == "z" or text_and_sound(last[request_id]) == text_and_sound(theirs)


@everywhere
def test_a_stage_that_ends_early_lets_its_source_finish(anywhere: Anywhere) -> None:
    """The talker stops by its length; later chunks are dropped, the text is complete."""
    limited = {"limit": 3, "steps_per_token": 4, "max_pending": 1}
    stages = speech_stages((1, 1), talker=limited)
    last = run(stages, {"x": PROMPTS["z"]})["x"]
    expected = run(speech_stages((None, None), talker=limited), {"x": PROMPTS["z"]})["x"]
    assert last.error is None
    assert text_and_sound(last) == text_and_sound(expected)
    # In a process of its own, the source may end before its pause arrives.
    assert stages[0].pauses > 0 or anywhere.kind != "inline"
    assert len(stages[1].received["x"]) < len(PROMPTS["z"])


@everywhere
def test_a_chunk_that_the_transform_refuses_ends_the_request() -> None:
    @chunkable
    def refusing(context: TransformContext) -> Prompt:
        if context.request_id == "x" and context.first_row:
            raise ValueError("not this one")
        return thinker_to_talker(context)

    last = run(speech_stages((1, 1), talker={"transform": refusing}))
    assert last["x"].error == "stage 'talker': not this one"
    assert text_and_sound(last["z"]) == text_and_sound(whole()["z"])


@everywhere
@pytest.mark.parametrize("chunks", [(1, 1), (None, None)])
def test_a_transform_that_never_says_it_is_the_last_chunk_does_not_hang(
    chunks: tuple[int | None, int | None],
) -> None:
    @chunkable
    def endless(context: TransformContext) -> Prompt:
        prompt = talker_to_code2wav(context)
        return replace(prompt, is_last=False) if context.request_id == "x" else prompt

    last = run(speech_stages(chunks, code2wav={"transform": endless}))
    assert "stage 'code2wav': it got a CodecPrompt with is_last=False" in str(last["x"].error)
    assert text_and_sound(last["z"]) == text_and_sound(whole()["z"])


@everywhere
def test_a_users_prompt_that_promises_more_is_refused() -> None:
    orchestrator = WholeOrchestrator(Pipeline([Vocoder("code2wav", final_output=("audio",))]))
    error = refusal(orchestrator, OmniRequest(CodecPrompt((1, 2), is_last=False), "x"))
    assert re.search(r"'code2wav': .* is_last=False, but nothing follows", error)
    assert not orchestrator.has_unfinished_requests


@everywhere
@pytest.mark.parametrize(
    ("method", "stage"),
    [("partial_tensors", 0), ("pause_request", 0), ("needs_input", 1), ("extend_request", 1)],
)
def test_a_stage_whose_streaming_fails_ends_the_request_alone(
    method: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = speech_stages((1, 1), talker={"steps_per_token": 4, "max_pending": 1})
    own = getattr(stages[stage], method)

    def broken(request_id: str, *rest: Any) -> Any:
        # Check a single stage, too; the runtime checks while all stages rest.
        if request_id == "x" and not stages[1].is_working:
            raise KeyError("gone")
        return own(request_id, *rest)

    monkeypatch.setattr(stages[stage], method, broken)
    last = run(stages)
    assert last["x"].error == f"stage {stages[stage].name!r}: KeyError: 'gone'"
    assert text_and_sound(last["z"]) == text_and_sound(whole()["z"])


@everywhere
def test_a_stage_that_cannot_resume_is_not_used_any_more(
    anywhere: Anywhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = speech_stages((1, 1), talker={"steps_per_token": 4, "max_pending": 1})

    def broken(request_id: str) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(stages[0], "resume_request", broken)
    last = run(stages)
    for request_id in ("x", "z"):
        error = str(last[request_id].error)
        reported = (
            "it cannot be used any more" if anywhere.kind == "inline" else "its worker was ended"
        )
        assert f"stage 'thinker': {reported}" in error
        assert "it broke by KeyError: 'gone'" in error


@everywhere
def test_one_that_may_go_on_and_has_no_seat_does_not_keep_the_others_from_going_on() -> None:
    """The one slot is taken by another request, which waits for it."""
    prompts = dict.fromkeys(("r0", "r1", "r2", "r3"), "a")
    narrow = {"seats": 1, "limit": 5, "max_pending": 1}
    changes: dict[str, Any] = {
        "thinker": narrow | {"rotate": 1, "tail": 4},
        "talker": narrow | {"tail": 0},
    }
    last = run(speech_stages((1, None), **changes), prompts)
    expected = run(speech_stages((None, None), **changes), prompts)
    for request_id in prompts:
        assert last[request_id].error is None
        assert text_and_sound(last[request_id]) == text_and_sound(expected[request_id])


@over_every_transport
def test_whatever_happens_every_request_ends_once_and_no_stage_keeps_anything(
    anywhere: Anywhere,
) -> None:
    anywhere.try_property(every_request_ends_once_and_nothing_is_left)


def every_request_ends_once_and_nothing_is_left(data: st.DataObject) -> None:
    ids = [f"r{index}" for index in range(data.draw(st.integers(1, 5), label="requests"))]
    prompts = {request_id: data.draw(st.text("abc", min_size=1, max_size=9)) for request_id in ids}
    mishap = st.dictionaries(st.sampled_from(ids), st.integers(0, 6), max_size=1)
    common = {
        "seats": st.integers(1, 3),
        "rotate": st.none() | st.integers(1, 5),
        "steps_per_token": st.integers(1, 3),
        "tail": st.integers(0, 4),
        "limit": st.sampled_from([2, 5, 1000]),
        "max_pending": st.integers(1, 3),
    }
    calm = data.draw(st.booleans(), label="nothing fails")
    changes: dict[str, dict[str, Any]] = {
        name: {
            **data.draw(st.fixed_dictionaries(common), label=name),
            **(
                {}
                if calm
                else data.draw(
                    st.fixed_dictionaries({"fail": mishap, "explode": mishap, "refuse": mishap})
                )
            ),
        }
        for name in ("thinker", "talker", "code2wav")
    }
    changes["thinker"]["tail"] += 1
    chunk = st.none() | st.integers(1, 5) | st.just(1000)
    chunks = (data.draw(chunk), data.draw(chunk))
    stages = speech_stages(chunks, **changes)
    stages[0].hide_rows = data.draw(st.none() | st.integers(2, 4))

    orchestrator = WholeOrchestrator(Pipeline(stages))
    last: dict[str, OmniOutput] = {}
    refused, aborted = set(), set()
    for request_id, prompt in prompts.items():
        try:
            orchestrator.add_request(OmniRequest(prompt, request_id))
        except ValueError:
            refused.add(request_id)
        victim = data.draw(st.none() | st.sampled_from(ids)) if not calm else None
        outputs: list[OmniOutput] = []
        for _ in range(data.draw(st.integers(0, 9))):
            if orchestrator.has_unfinished_requests:  # an idle one waits for a request
                outputs += orchestrator.step()
        if victim is not None and (ended := orchestrator.abort(victim)) is not None:
            aborted.add(victim)
            outputs.append(ended)
        for output in outputs:
            assert output.request_id not in last, "nothing follows the end"
            if output.finished:
                last[output.request_id] = output
    for request_id, of_request in drain(orchestrator).items():
        assert request_id not in last
        last[request_id] = of_request[-1]

    assert last.keys() | refused == set(ids)
    assert_settled(stages)
    if calm:
        assert not refused
        expected = run(speech_stages((None, None), **changes), prompts)
        for request_id in ids:
            assert last[request_id].error is None
            assert text_and_sound(last[request_id]) == text_and_sound(expected[request_id])
