"""Steps that fail now and then cost nobody anything but time, under random request streams."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import EngineConfig, LLMEngine
from tests.support.examples import examples
from tests.support.faults import POINTS, Faults
from tests.support.request_stream import BLOCK_SIZE, Ask, Script, alone_with, run_stream, scripts

MAX_PROMPT = 24
KINDS = {
    "recomputed": {"preemption": "recompute"},
    "swapped": {"preemption": "swap"},
    "uncached": {"enable_prefix_caching": False},
}


class Faulty:
    """An engine with a small pool, whose steps can be made to fail."""

    def __init__(self, checkpoint: str, kind: str, output_names: tuple[str, ...] | None) -> None:
        self.engine = LLMEngine(
            EngineConfig(
                model=checkpoint,
                block_size=BLOCK_SIZE,
                num_blocks=16,
                max_num_seqs=4,
                max_num_batched_tokens=16,
                **KINDS[kind],
            ),
            output_names=output_names,
        )
        self.faults = Faults(self.engine)
        self.alone = alone_with(checkpoint, output_names)


# Without outputs nothing but the blocks' hashes keeps a later request from keys and values that
# a failed step did not write.
@pytest.fixture(scope="module", params=[(kind, names) for kind in KINDS for names in (None, ())])
def faulty(request: pytest.FixtureRequest, qwen2_checkpoint: str) -> Faulty:
    return Faulty(qwen2_checkpoint, *request.param)


@settings(max_examples=examples(40))
@given(
    script=scripts(MAX_PROMPT),
    points=st.lists(st.sampled_from([None, None, *POINTS]), max_size=40),
)
def test_everybody_says_what_they_say_alone_then_and_later(
    faulty: Faulty, script: Script, points: list[str | None]
) -> None:
    faulty.faults.plan(points)
    run_stream(faulty.engine, script, faulty.alone)
    faulty.faults.plan(())
    again: Script = [("add", ask) for _, ask in script if isinstance(ask, Ask)]
    run_stream(faulty.engine, again, faulty.alone)
    assert not faulty.faults.violations


def test_the_streams_do_fail_and_preempt(faulty: Faulty) -> None:
    """Else the property above would prove nothing."""
    busy: Script = [
        ("add", Ask(family, 6, tail, 20, False, False, 0, None))
        for family in range(3)
        for tail in (1, 2)
    ]
    faults, preemptions = faulty.faults.count, faulty.engine.stats().num_preemptions
    faulty.faults.plan([None, "prepared", "computed", None, "sampled", None, "written"])
    run_stream(faulty.engine, busy, faulty.alone)
    assert faulty.faults.count == faults + 4
    assert faulty.engine.stats().num_preemptions > preemptions
