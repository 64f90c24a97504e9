"""Counts of the work that a voice pipeline must not repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

from omni import Omni, OmniOutput
from stages import StageStats
from tests.support.omni_stages import Conversation, Turn, build_pipeline

BLOCK_SIZE = 8
TOWERS: dict[str, Any] = {
    "vision": modeling.Qwen2_5OmniVisionEncoder,
    "audio": modeling.Qwen2_5OmniAudioEncoder,
    "voice": modeling.ECAPA_TimeDelayNet,
}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of runs of each of the encoders."""
    counted: Counter[str] = Counter()

    def counting(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return forward(*args, **kwargs)

        return inner

    for name, tower in TOWERS.items():
        monkeypatch.setattr(tower, "forward", counting(name, tower.forward))
    return counted


@pytest.fixture(params=[False, True], ids=["whole", "streaming"])
def omni(seeded: Callable[[str], str], request: pytest.FixtureRequest) -> Iterator[Omni]:
    folder = seeded("qwen2_5_omni")
    with Omni(build_pipeline(folder, streaming=request.param, block_size=BLOCK_SIZE)) as omni:
        yield omni


def ask(omni: Omni, conversation: Conversation) -> tuple[OmniOutput, dict[str, StageStats]]:
    """Run one request alone; return its output and what it added to the counters."""
    before = omni.stats()
    (output,) = omni.generate(conversation.request("r"))
    assert output.error is None
    return output, {name: after.since(before[name]) for name, after in omni.stats().items()}


def test_a_repeated_picture_and_sound_run_no_tower(omni: Omni, runs: Counter[str]):
    ask(omni, Conversation((Turn(0, picture=0, sound=0),)))
    assert (runs["vision"], runs["audio"]) == (1, 1)
    # The same again, at another position, in another conversation, before another question.
    ask(omni, Conversation((Turn(0, picture=0, sound=0),)))
    ask(omni, Conversation((Turn(1, picture=0, item_first=False),), system=1))
    ask(omni, Conversation((Turn(1), Turn(2, sound=0)), system=1))
    assert (runs["vision"], runs["audio"]) == (1, 1)
    # As many placeholders, but another picture.
    _, added = ask(omni, Conversation((Turn(0, picture=1),)))
    assert (runs["vision"], runs["audio"]) == (2, 1)
    assert (added["thinker"].encoder_runs, added["thinker"].encoder_hits) == (1, 0)
    _, added = ask(omni, Conversation((Turn(2, picture=1, item_first=False),)))
    assert (added["thinker"].encoder_runs, added["thinker"].encoder_hits) == (0, 1)
    assert omni.stats()["thinker"].encoder_runs == runs["vision"] + runs["audio"]
    assert omni.stats()["talker"].encoder_runs == 0


def test_a_voice_is_encoded_once(omni: Omni, runs: Counter[str]):
    for _ in range(2):
        ask(omni, Conversation((Turn(0),), speaker=1))
    assert runs["voice"] == 1


def test_a_repeated_prefix_prefills_only_what_is_new(omni: Omni):
    first, second = Turn(0, picture=0, sound=0), Turn(1)
    before, cold = ask(omni, Conversation((first,)))
    after, warm = ask(omni, Conversation((first, second)))
    assert cold["thinker"].cached_tokens == cold["talker"].cached_tokens == 0
    # The shared prefix of the first turn's prompt and the second's: all but the role marker.
    shared = before.stages["thinker"].num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE
    for stage in ("thinker", "talker"):
        total = after.stages[stage].num_prompt_tokens
        assert warm[stage].prompt_tokens == total
        assert shared - BLOCK_SIZE <= warm[stage].cached_tokens <= shared
        assert warm[stage].cached_tokens == after.stages[stage].num_cached_tokens


def test_the_same_request_again_prefills_less_than_a_block(omni: Omni):
    asked = Conversation((Turn(0, picture=1), Turn(1, sound=1)), system=1)
    ask(omni, asked)
    output, spent = ask(omni, asked)
    for stage in ("thinker", "talker"):
        new = output.stages[stage].num_prompt_tokens - spent[stage].cached_tokens
        # The talker's rows of the thinker's recomputed tail may differ in the last bit.
        assert 1 <= new <= (BLOCK_SIZE if stage == "thinker" else 2 * BLOCK_SIZE + 2)
