"""Requests cross any graph of stages; an error of one ends it alone and leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from engine import FinishReason, Prompt, SamplingParams
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniOutput, OmniRequest
from stages import StageOutput, TransformContext
from tests.support.fake_stage import FakeStage
from tests.support.placed import Anywhere, everywhere, over_every_transport
from tests.support.settled_stages import assert_settled, refusal
from tests.support.speech_pipeline import drain, until
from tests.support.whole_orchestrator import WholeOrchestrator


def run(stages: Sequence[FakeStage], *ids: str) -> dict[str, OmniOutput]:
    """Run one request per id through a pipeline; check that nothing is left behind."""
    orchestrator = WholeOrchestrator(Pipeline(stages))
    for request_id in ids:
        orchestrator.add_request(OmniRequest(request_id, request_id))
    outputs = drain(orchestrator)
    assert_settled(stages)
    for of_request in outputs.values():
        assert [output.finished for output in of_request] == [False] * (len(of_request) - 1) + [
            True
        ]
    return {request_id: of_request[-1] for request_id, of_request in outputs.items()}


def texts(output: OmniOutput) -> dict[str, str | None]:
    return {name: stage.text for name, stage in output.stages.items()}


@everywhere
def test_a_request_passes_those_that_stay_behind() -> None:
    """None waits for the others of its batch, in the first stage or in the last one."""
    a, b = FakeStage("a", endless=["in a"]), FakeStage("b", ("a",), endless=["in b"])
    orchestrator = WholeOrchestrator(Pipeline([a, b]))
    for request_id in ("in a", "in b"):
        orchestrator.add_request(OmniRequest("p", request_id))
    until(orchestrator, lambda: "in a" in a.held and "in b" in b.held)
    orchestrator.add_request(OmniRequest("p", "goes through"))
    outputs: list[OmniOutput] = []
    while not any(output.finished for output in outputs):
        outputs += orchestrator.step()
    assert outputs[-1].request_id == "goes through"
    assert texts(outputs[-1]) == {"a": "a(p)", "b": "b(a(p))"}
    for request_id in ("in a", "in b"):
        ended = orchestrator.abort(request_id)
        assert ended is not None and ended.error == "aborted"
    assert_settled([a, b])


def test_a_request_enters_a_stage_as_soon_as_its_sources_are_done() -> None:
    """Turn by turn, in one thread; stages elsewhere have no common turns."""
    a, b = FakeStage("a", steps=1), FakeStage("b", ("a",), steps=3)
    orchestrator = WholeOrchestrator(Pipeline([a, b]))
    orchestrator.add_request(OmniRequest("x", "first"))
    orchestrator.step()
    assert "first" in b.held
    orchestrator.add_request(OmniRequest("x", "second"))
    until(orchestrator, lambda: "second" in b.held)
    assert list(b.held) == ["first", "second"]
    assert b.held["first"][1] == 1, "the last stage works while the first takes new requests"


@everywhere
def test_a_transform_is_told_the_request_the_prompt_and_its_sources_in_order() -> None:
    seen: list[TransformContext] = []

    def spy(context: TransformContext) -> Prompt:
        seen.append(context)
        return "made"

    stages = [FakeStage("a"), FakeStage("b"), FakeStage("c", ("b", "a"), transform=spy)]
    assert texts(run(stages, "x")["x"])["c"] == "c(made)"
    assert seen[0].request_id == seen[0].prompt == "x"
    assert [source.stage for source in seen[0].sources] == ["b", "a"]
    assert all("hidden_states" in source.tensors for source in seen[0].sources)


@everywhere
def test_the_user_gets_what_final_output_asks_for() -> None:
    both, text, none = FakeStage("both"), FakeStage("text"), FakeStage("none", final=False)
    tensors = FakeStage("tensors", ("none",))
    both.final_output, tensors.final_output = ("text", "tensors"), ("tensors",)
    stages = run([both, text, none, tensors], "x")["x"].stages
    assert list(stages) == ["both", "text", "tensors"]
    assert (stages["both"].text, list(stages["both"].tensors)) == ("both(x)", ["hidden_states"])
    assert (stages["text"].text, list(stages["text"].tensors)) == ("text(x)", [])
    assert (stages["tensors"].text, stages["tensors"].delta) == (None, "")
    assert stages["tensors"].token_ids and stages["tensors"].finish_reason is FinishReason.STOP
    assert list(stages["tensors"].tensors) == ["hidden_states"]


@everywhere
def test_priority_salt_and_sampling_reach_the_stages_they_are_for() -> None:
    a = FakeStage("a", sampling=SamplingParams(max_tokens=5, temperature=0.5, seed=1))
    b = FakeStage("b", ("a",), sampling=SamplingParams())
    orchestrator = WholeOrchestrator(Pipeline([a, b]))
    whole = SamplingParams(top_k=3, seed=2)
    orchestrator.add_request(
        OmniRequest(
            "p", "x", sampling={"a": {"max_tokens": 7}, "b": whole}, priority=4, cache_salt="s"
        )
    )
    drain(orchestrator)
    assert a.seen["x"].sampling == SamplingParams(max_tokens=7, temperature=0.5, seed=1)
    assert b.seen["x"].sampling == whole
    for stage in (a, b):
        assert (stage.seen["x"].priority, stage.seen["x"].cache_salt) == (4, "s")


@everywhere
@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"wirter": {}}, "stage 'wirter', which does not exist; did you mean 'writer'"),
        ({"plain": {"max_tokens": 1}}, "stage 'plain': it generates no tokens"),
        ({"writer": {"max_tokns": 1}}, "stage 'writer': max_tokns: unknown key; did you mean"),
        ({"writer": {"max_tokens": -1}}, "stage 'writer': max_tokens: .*-1"),
        ({"writer": SamplingParams(n=2)}, "n=2 completions, but it feeds plain"),
    ],
)
def test_wrong_sampling_is_that_requests_error(sampling: dict[str, Any], message: str) -> None:
    writer = FakeStage("writer", sampling=SamplingParams())
    orchestrator = WholeOrchestrator(Pipeline([writer, FakeStage("plain", ("writer",))]))
    with pytest.raises(ValueError, match=message):
        orchestrator.add_request(OmniRequest("p", "x", sampling=sampling))
    assert not orchestrator.has_unfinished_requests
    writer.check_integrity()


@everywhere
def test_an_id_is_needed_and_cannot_be_taken_twice_at_a_time() -> None:
    orchestrator = WholeOrchestrator(Pipeline([FakeStage("a")]))
    with pytest.raises(ValueError, match="needs a request_id"):
        orchestrator.add_request(OmniRequest("p"))
    orchestrator.add_request(OmniRequest("p", "x"))
    with pytest.raises(ValueError, match="'x' belongs to a request that is still running"):
        orchestrator.add_request(OmniRequest("p", "x"))
    assert drain(orchestrator)["x"][-1].error is None
    orchestrator.add_request(OmniRequest("p", "x"))
    assert drain(orchestrator)["x"][-1].error is None


@everywhere
def test_a_request_that_one_root_refuses_leaves_the_others() -> None:
    stages = [FakeStage("a"), FakeStage("b", refuse=["bad"]), FakeStage("c", ("a", "b"))]
    orchestrator = WholeOrchestrator(Pipeline(stages))
    assert refusal(orchestrator, OmniRequest("p", "bad")) == "stage 'b': refused"
    assert not orchestrator.has_unfinished_requests
    assert_settled(stages)


def broken_transform(context: TransformContext) -> Prompt:
    if context.request_id == "bad":
        raise KeyError("missing")
    return str(context.sources[0].text)


def refusing_transform(context: TransformContext) -> Prompt:
    if context.request_id == "bad":
        raise ValueError("not this one")
    return str(context.sources[0].text)


def careless_transform(context: TransformContext) -> Prompt:
    return None if context.request_id == "bad" else "fine"  # type: ignore[return-value]


@everywhere
@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"refuse": ["bad"]}, "stage 'b': refused"),
        ({"fail": ["bad"]}, "stage 'b': told to fail"),
        ({"lose": ["bad"], "steps": 9}, "stage 'b': it lost the request"),
        ({"transform": broken_transform}, "stage 'b': KeyError: 'missing'"),
        ({"transform": refusing_transform}, "stage 'b': not this one"),
        ({"transform": careless_transform}, "returned a NoneType, not a prompt"),
    ],
)
def test_what_goes_wrong_with_one_request_ends_it_alone(
    second: dict[str, Any], message: str
) -> None:
    """A side branch is still running when the request fails; it is freed there as well."""
    stages = [FakeStage("a"), FakeStage("b", ("a",), **second), FakeStage("side", steps=50)]
    outputs = run(stages, "good", "bad", "fine")
    assert message in str(outputs["bad"].error)
    assert outputs["bad"].stages["a"].text == "a(bad)", "finished outputs are still reported"
    assert outputs["bad"].stages["b"].finish_reason is FinishReason.ERROR
    assert outputs["good"].error is None
    assert outputs["fine"].error is None


@everywhere
def test_a_step_that_raises_fails_the_requests_in_that_stage() -> None:
    a, b = FakeStage("a", explode=["bad"], endless=["beside"]), FakeStage("b")
    orchestrator = WholeOrchestrator(Pipeline([a, b]))
    orchestrator.add_request(OmniRequest("p", "beside"))
    until(orchestrator, lambda: "beside" in a.held)
    orchestrator.add_request(OmniRequest("p", "bad"))
    outputs = drain(orchestrator)
    for request_id in ("bad", "beside"):
        assert outputs[request_id][-1].error == "stage 'a': its step failed: ArithmeticError: boom"
    assert a.resets == 1, "nothing that it had cached is trusted"
    orchestrator.add_request(OmniRequest("p", "after"))
    assert drain(orchestrator)["after"][-1].error is None
    assert_settled([a, b])


@everywhere
def test_requests_in_other_stages_go_on_when_a_step_raises() -> None:
    a, b = FakeStage("a", endless=["behind"]), FakeStage("b", ("a",), explode=["bad"])
    orchestrator = WholeOrchestrator(Pipeline([a, b]))
    for request_id in ("behind", "bad"):
        orchestrator.add_request(OmniRequest("p", request_id))
    ended: list[OmniOutput] = []
    until(orchestrator, lambda: "behind" in a.held)
    while not ended:
        ended += [output for output in orchestrator.step() if output.finished]
    assert ended[0].request_id == "bad" and "boom" in str(ended[0].error)
    a.endless = ()
    assert drain(orchestrator)["behind"][-1].error is None


@everywhere
def test_a_stage_that_cannot_be_cleaned_up_refuses_what_comes_later_or_gets_another_worker(
    anywhere: Anywhere,
) -> None:
    """Here each worker gets the same stage, which is as broken as before."""
    stages = [FakeStage("a", steps=1), FakeStage("b", ("a",), explode=["bad"], stuck=True)]
    orchestrator = WholeOrchestrator(Pipeline(stages))
    orchestrator.add_request(OmniRequest("p", "bad"))
    assert "boom" in str(drain(orchestrator)["bad"][-1].error)
    orchestrator.add_request(OmniRequest("p", "next"))
    error = str(drain(orchestrator)["next"][-1].error)
    reported = "it cannot be used any more" if anywhere.kind == "inline" else "its worker was ended"
    assert f"stage 'b': {reported}" in error
    assert "stuck" in error


@everywhere
@pytest.mark.parametrize("turns", range(5))
def test_a_request_can_be_aborted_at_any_time(turns: int) -> None:
    stages = [FakeStage("a"), FakeStage("b", ("a",), steps=3, endless=["gone"])]
    orchestrator = WholeOrchestrator(Pipeline(stages))
    for request_id in ("gone", "stays"):
        orchestrator.add_request(OmniRequest(request_id, request_id))
    outputs = [output for _ in range(turns) for output in orchestrator.step()]
    output = orchestrator.abort("gone")
    assert output is not None
    assert (output.finished, output.error) == (True, "aborted")
    assert output.stages["b"].finish_reason is FinishReason.ABORT
    assert orchestrator.abort("gone") is None
    outputs += chain.from_iterable(drain(orchestrator).values())
    assert_settled(stages)
    (last,) = (output for output in outputs if output.finished)
    assert texts(last) == {"a": "a(stays)", "b": "b(a(stays))"}


class KeptTensors:
    """The rows of a stage's output, which the object itself does not hold."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._seen: list[weakref.ref[torch.Tensor]] = []

    def see(self, output: StageOutput) -> None:
        """Record an output's rows; call it with every output."""
        if output.stage == self._stage:
            self._seen.append(weakref.ref(output.tensors["hidden_states"]))

    @property
    def count(self) -> int:
        """Return how many are still alive."""
        assert self._seen
        gc.collect()
        return sum(rows() is not None for rows in self._seen)


def test_tensors_are_dropped_as_soon_as_the_next_stage_has_its_prompt() -> None:
    """A remote stage's inputs are kept until it is done: should it die, it begins again."""
    a, b = FakeStage("a", steps=1), FakeStage("b", ("a",), steps=9)
    kept = KeptTensors("a")
    orchestrator = WholeOrchestrator(Pipeline([a, b]), on_stage_output=kept.see)
    orchestrator.add_request(OmniRequest("p", "x"))
    orchestrator.step()
    assert kept.count == 0
    drain(orchestrator)


@everywhere
def test_tensors_are_dropped_when_no_stage_needs_them_any_more() -> None:
    a, b, c = FakeStage("a"), FakeStage("b", ("a",)), FakeStage("c", ("b",), endless=["x"])
    kept = KeptTensors("a")
    orchestrator = WholeOrchestrator(Pipeline([a, b, c]), on_stage_output=kept.see)
    orchestrator.add_request(OmniRequest("p", "x"))
    until(orchestrator, lambda: "x" in c.held and kept.count == 0)
    orchestrator.abort("x")
    assert_settled([a, b, c])


@over_every_transport
def test_in_any_graph_every_request_ends_once_and_nothing_is_left(
    anywhere: Anywhere,
) -> None:
    anywhere.try_property(every_request_ends_once_and_nothing_is_left)


def every_request_ends_once_and_nothing_is_left(data: st.DataObject) -> None:
    names = [f"s{index}" for index in range(data.draw(st.integers(1, 5), label="stages"))]
    ids = [f"r{index}" for index in range(data.draw(st.integers(1, 6), label="requests"))]
    some = st.lists(st.sampled_from(ids), unique=True, max_size=1)
    feeding: dict[str, tuple[str, ...]] = {
        name: tuple(data.draw(st.lists(st.sampled_from(names[:i]), unique=True))) if i else ()
        for i, name in enumerate(names)
    }
    stages = [
        FakeStage(
            name,
            feeding[name],
            steps=data.draw(st.integers(1, 4)),
            refuse=data.draw(some),
            fail=data.draw(some),
            lose=data.draw(some),
            explode=data.draw(some),
        )
        for name in names
    ]
    orchestrator = WholeOrchestrator(Pipeline(stages))
    last: dict[str, OmniOutput] = {}
    refused = set()
    for request_id in ids:
        try:
            orchestrator.add_request(OmniRequest(request_id, request_id))
        except ValueError:
            refused.add(request_id)
        victim = data.draw(st.none() | st.sampled_from(ids))
        for output in [
            *orchestrator.step(),
            *([orchestrator.abort(victim)] if victim is not None else []),
        ]:
            if output is not None and output.finished:
                assert output.request_id not in last, "a request ends once"
                last[output.request_id] = output
    for request_id, outputs in drain(orchestrator).items():
        assert request_id not in last
        last[request_id] = outputs[-1]
    assert last.keys() | refused == set(ids)
    assert not last.keys() & refused
    assert_settled(stages)

    def expected(name: str, request_id: str) -> str:
        inner = "".join(expected(source, request_id) for source in feeding[name])
        return f"{name}({inner or request_id})"

    for request_id, output in last.items():
        if output.error is None:
            assert texts(output) == {name: expected(name, request_id) for name in names}
