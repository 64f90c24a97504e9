"""A graph of stages that cannot work is refused on construction."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import SamplingParams
from omni.pipelines.graph_rules import topological_order
from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from stages import (
    AutoregressiveStageConfig,
    EncoderStageConfig,
    Stage,
    StageConfig,
    TransformContext,
    requires,
)
from tests.support.fake_stage import FakeStage

EMBEDS = "hidden_states_as_prompt_embeds"


def refuse_all(context: TransformContext) -> str:
    raise ValueError(context.request_id)


@requires("codes", num_sources=1)
def needs_codes(context: TransformContext) -> str:
    return str(context.sources[0].tensors["codes"])


def test_order_consumers_and_transforms_are_resolved_when_it_is_made() -> None:
    pipeline = Pipeline(
        [
            FakeStage("last", ("left", "right"), transform=refuse_all),
            FakeStage("left", ("root",), final=False),
            FakeStage("right", ("root",), transform=f"{__name__}:refuse_all", final=False),
            FakeStage("root", final=False),
        ]
    )
    assert pipeline.order == ("root", "left", "right", "last")
    assert pipeline.consumers["root"] == ("left", "right")
    assert pipeline.consumers["last"] == ()
    assert pipeline.final_stages == ("last",)
    assert pipeline.transforms["last"] is refuse_all
    assert pipeline.transforms["right"].__name__ == "refuse_all"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "at least one stage"),
        ([FakeStage("a"), FakeStage("a")], "two stages are named 'a'"),
        ([FakeStage("writer"), FakeStage("b", ("writr",))], "unknown stage 'writr'; did you"),
        ([FakeStage("a"), FakeStage("b", ("a", "a"))], "a stage is named twice: a, a"),
        ([FakeStage("a", ("b",)), FakeStage("b", ("a",))], "circle: a -> b -> a|b -> a -> b"),
        ([FakeStage("a", final=False)], "nothing comes out of this pipeline"),
        (
            [FakeStage("a"), FakeStage("b", ("a",), final=False)],
            "'b': no stage takes its",
        ),
        (
            [FakeStage("a"), FakeStage("b", ("a",), transform="text_as_promt")],
            "unknown transform 'text_as_promt'; did you mean 'text_as_prompt'",
        ),
        (
            [
                FakeStage("a", hidden_size=64),
                FakeStage("b", ("a",), transform=EMBEDS, hidden_size=32),
            ],
            "64 wide, but its own embeddings are 32 wide",
        ),
        (
            [FakeStage("a", outputs=["logits"]), FakeStage("b", ("a",), transform=EMBEDS)],
            "add 'hidden_states'",
        ),
        (
            [
                FakeStage("a", outputs=["hidden_states"]),
                FakeStage("b", ("a",), transform="thinker_to_talker"),
            ],
            "add 'token_embeds', 'position_ids' to them",
        ),
        (
            [FakeStage("a", outputs=()), FakeStage("b", ("a",), transform=needs_codes)],
            r"stage 'a': outputs: \[\] is not what stage 'b' needs .*: add 'codes' to them",
        ),
        (
            [
                FakeStage("a"),
                FakeStage("b"),
                FakeStage("c", ("a", "b"), transform=f"{__name__}:needs_codes"),
            ],
            "stage 'c': inputs.from: transform '.*:needs_codes' takes 1 .*, got 2",
        ),
        (
            [FakeStage("a", sampling=SamplingParams(n=2)), FakeStage("b", ("a",))],
            "n > 1 is for stages that feed none",
        ),
    ],
)
def test_a_wrong_graph_is_one_clear_error(stages: list[Stage], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pipeline(stages)


def test_several_completions_are_fine_in_a_stage_that_feeds_none() -> None:
    Pipeline([FakeStage("a"), FakeStage("b", ("a",), sampling=SamplingParams(n=2))])


def test_close_closes_every_stage_even_if_one_fails_to() -> None:
    class Stubborn(FakeStage):
        def close(self) -> None:
            raise OSError("cannot close")

    stages = [FakeStage("a"), Stubborn("b", ("a",)), FakeStage("c", ("b",))]
    with pytest.raises(OSError, match="cannot close"):
        Pipeline(stages).close()
    assert stages[0].closed
    assert stages[2].closed


def _config(second: dict[str, Any]) -> PipelineConfig:
    first = {"kind": "autoregressive", "model": "seeded:qwen2", "final_output": "text"}
    return PipelineConfig.model_validate({"name": "p", "stages": {"first": first} | second})


def test_stages_already_built_are_closed_if_a_later_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[FakeStage] = []

    def build(config: StageConfig, name: str) -> Stage:
        if name == "second":
            raise ValueError("no memory")
        built.append(FakeStage(name))
        return built[-1]

    for kind in (AutoregressiveStageConfig, EncoderStageConfig):
        monkeypatch.setattr(kind, "build_stage", build)
    second = {"kind": "encoder", "model": "seeded:bert", "final_output": "tensors"}
    with pytest.raises(ValueError, match="stage 'second': no memory"):
        Pipeline.from_config(_config({"second": second}))
    assert [stage.closed for stage in built] == [True]


@given(st.data())
def test_every_stage_comes_after_all_that_feed_it(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    names = [f"s{index}" for index in range(count)]
    feeding = {
        name: data.draw(st.lists(st.sampled_from(names[:index]), unique=True)) if index else []
        for index, name in enumerate(names)
    }
    shuffled = data.draw(st.permutations(names))
    order = topological_order({name: feeding[name] for name in shuffled})
    assert sorted(order) == names
    for name in names:
        assert all(order.index(source) < order.index(name) for source in feeding[name])


def test_stages_of_one_rank_stay_in_the_order_given() -> None:
    assert topological_order({"z": [], "a": ["z", "m"], "m": [], "b": []}) == ["z", "m", "b", "a"]


@pytest.mark.parametrize(
    ("sources", "circle"),
    [
        ({"a": ["a"]}, {"a"}),
        ({"a": ["b"], "b": ["a"]}, {"a", "b"}),
        ({"root": [], "a": ["root", "c"], "b": ["a"], "c": ["b"]}, {"a", "b", "c"}),
    ],
)
def test_a_circle_is_named(sources: dict[str, list[str]], circle: set[str]) -> None:
    with pytest.raises(ValueError, match="in a circle") as caught:
        topological_order(sources)
    named = str(caught.value).split(": ")[1].split(" -> ")
    assert named[0] == named[-1]
    assert set(named) == circle
    for feeding, stage in pairwise(named):
        assert feeding in sources[stage]


def test_a_chain_may_be_as_long_as_a_file_can_say() -> None:
    chain = {"s0": [], **{f"s{n}": [f"s{n - 1}"] for n in range(1, 5_000)}}
    backwards = dict(reversed(chain.items()))
    assert topological_order(backwards) == list(chain)
