"""Parameters that a later stage cannot sample with are refused before earlier stages have begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine import SamplingParams
from engine.interface.placed_error import PlacedError
from engine.interface.settings import dotted
from omni import Omni, OmniRequest
from tests.support.fake_stage import FakeStage
from tests.support.omni_stages import Conversation, Turn, build_pipeline
from tests.support.shared_worker import omni_apart
from tests.support.whole_orchestrator import WholeOrchestrator

ASKED = Conversation((Turn(0),))


@pytest.mark.parametrize(
    ("sampling", "message", "place"),
    [
        ({"talker": {"stop": ["."]}}, "sampling for stage 'talker': .*stop", "talker.stop"),
        (
            {"talker": {"stop_token_ids": [99_999]}},
            "sampling for stage 'talker': .*99999",
            "talker.stop_token_ids",
        ),
        (
            {"talker": {"suppress_token_ids": [264]}},
            "sampling for stage 'talker': .*264",
            "talker.suppress_token_ids",
        ),
        ({"talker": SamplingParams(stop=("x",))}, "stage 'talker': .*stop", "talker.stop"),
        ({"talker": {"top_p": 7}}, "sampling for stage 'talker': top_p: ", "talker.top_p"),
        ({"thinker": {"n": 2}}, "sampling for stage 'thinker': n=2 completions", "thinker.n"),
        ({"code2wav": {"seed": 1}}, "sampling for stage 'code2wav': .*no tokens", "code2wav"),
        ({"talkr": {"seed": 1}}, "stage 'talkr', which does not exist.*'talker'", "talkr"),
    ],
)
def test_a_later_stages_sampling_is_refused_before_the_first_has_run(
    seeded: Callable[[str], str], sampling: Any, message: str, place: str
) -> None:
    pipeline = build_pipeline(seeded("qwen2_5_omni"))
    orchestrator = WholeOrchestrator(pipeline)
    with pytest.raises(PlacedError, match=message) as refused:
        orchestrator.add_request(ASKED.request("r", sampling=sampling))
    assert dotted(refused.value.place) == place
    assert not orchestrator.has_unfinished_requests
    assert not any(stage.has_unfinished_requests for stage in pipeline.stages.values())
    pipeline.close()


def test_a_stages_own_sampling_is_checked_as_a_requests(seeded: Callable[[str], str]) -> None:
    pipeline = build_pipeline(seeded("qwen2_5_omni"), talker_stop=("end",))
    with Omni(pipeline) as omni:
        for _ in range(2):  # a failed check is not cached as a success
            (output,) = omni.generate(ASKED.request("r"))
            assert output.error is not None and "sampling for stage 'talker'" in output.error
        (better,) = omni.generate(
            OmniRequest(ASKED.request("r").prompt, sampling={"talker": {"stop": []}})
        )
        assert better.error is None
    assert omni.stats()["thinker"].prompt_tokens == better.stages["thinker"].num_prompt_tokens


def test_a_stages_own_sampling_is_checked_once_and_a_requests_each_time(
    seeded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = build_pipeline(seeded("qwen2_5_omni"))
    checked: list[SamplingParams] = []
    monkeypatch.setattr(pipeline.stages["thinker"], "check_sampling", checked.append)
    for _ in range(3):
        assert pipeline.merge_sampling({}) == {}
        pipeline.merge_sampling({"thinker": {"seed": 7}})
    own = pipeline.stages["thinker"].sampling
    assert own is not None and checked[0] is own
    assert [params.seed for params in checked] == [own.seed, 7, 7, 7]
    pipeline.close()


class Picky(FakeStage):
    """Accepts no parameters at all."""

    def check_sampling(self, params: SamplingParams) -> None:
        raise PlacedError(("stop", 1), "one too many")


def test_what_a_stage_elsewhere_refuses_keeps_its_place() -> None:
    with (
        omni_apart(Picky("b")) as omni,
        pytest.raises(PlacedError, match="^one too many$") as refused,
    ):
        omni.pipeline.stages["b"].check_sampling(SamplingParams())
    assert refused.value.place == ("stop", 1)
