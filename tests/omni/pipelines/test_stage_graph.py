"""Stages are ordered by what feeds what."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni.pipelines.graph_rules import topological_order


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
