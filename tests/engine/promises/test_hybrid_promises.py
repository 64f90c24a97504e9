"""The engine's promises for every family whose layers keep different things.

Window 16 in blocks of 4, prompts of up to five windows, on pools that evict and preempt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from engine import EngineConfig, LLMEngine, TokensPrompt
from omni.seeded.language_models import build_causal_lm
from prefix_cache import HostOnlySpec
from tests.support.examples import examples
from tests.support.request_stream import (
    BLOCK_SIZE,
    Alone,
    Ask,
    Script,
    alone_with,
    run_stream,
    scripts,
)

MAX_PROMPT = 76
# Large pages with which a few requests fill the pool, and one of the longest still fits.
FAMILIES = {
    "mistral-sliding": 18,
    "qwen2-sliding": 36,
    "ministral": 36,
    "gemma2": 36,
    "gemma3": 32,
    "jamba": 6,
    "bamba": 6,
    "jamba-recurrent": 6,
}
# A state does not grow: who is let in has room to finish, unless keys and values take it.
MAY_RUN_TO_THE_END = ("jamba", "bamba", "jamba-recurrent")
HOST_ONLY = ("mistral-sliding", "jamba-recurrent")


@dataclass(frozen=True)
class Family:
    name: str
    checkpoint: str
    engine: LLMEngine
    alone: Alone


def small_engine(checkpoint: str, num_blocks: int) -> LLMEngine:
    return LLMEngine(
        EngineConfig(
            model=checkpoint,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=96,
        )
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest,
    seeded: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Family:
    name: str = request.param
    if name == "jamba-recurrent":  # its first attention layer would be the third
        folder: Path = tmp_path_factory.mktemp("recurrent")
        checkpoint = str(build_causal_lm(folder, "jamba", tied=False, num_layers=2))
    else:
        checkpoint = seeded(name)
    # Uncached runs of these seeded weights differ by as much among themselves.
    alone = alone_with(checkpoint, atol=2e-5 if name == "gemma3" else 1e-5)
    return Family(name, checkpoint, small_engine(checkpoint, FAMILIES[name]), alone)


@settings(max_examples=examples(60))
@given(script=scripts(MAX_PROMPT))
def test_random_streams_equal_uncached_and_conserve_blocks(family: Family, script: Script) -> None:
    run_stream(family.engine, script, family.alone)


def test_streams_do_evict_and_preempt(family: Family) -> None:
    """Else the property above would prove nothing; that they hit, the last test here shows."""
    growing: Script = [
        ("add", Ask(number % 3, 8 + number, 0, 70, False, False, 0, None)) for number in range(8)
    ]
    before = family.engine.stats()
    run_stream(family.engine, growing, family.alone)
    after = family.engine.stats()
    assert before.kv is not None and after.kv is not None
    assert after.kv.evictions > before.kv.evictions
    preempted = after.num_preemptions > before.num_preemptions
    assert preempted or family.name in MAY_RUN_TO_THE_END


@pytest.mark.parametrize("refused", [2, 9], ids=["in its prompt", "in its answer"])
def test_a_preempted_request_says_the_same(
    family: Family, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = family.engine._kv.allocate_slots
    calls = count()

    def refuse_once(*args: Any, **kwargs: Any) -> bool:
        return next(calls) != refused and allocate(*args, **kwargs)

    monkeypatch.setattr(family.engine._kv, "allocate_slots", refuse_once)
    before = family.engine.stats().num_preemptions
    script: Script = [("add", Ask(refused % 3, 63, 0, 9, False, False, 0, "own"))]
    family.engine.reset_prefix_cache()
    run_stream(family.engine, script, family.alone)
    assert family.engine.stats().num_preemptions == before + 1


def test_models_without_full_attention_get_a_group_on_the_host(family: Family) -> None:
    groups = family.engine._kv.config.groups
    on_host = [isinstance(group.spec, HostOnlySpec) for group in groups]
    assert any(on_host) == (family.name in HOST_ONLY)
    rows = family.engine._kv.stage_outputs
    assert "hidden_states" in rows.shapes


def test_a_conversation_hits_what_its_last_turn_left(family: Family) -> None:
    """Turn after turn, all but the last block's tokens are found, windows and states included."""
    family.engine.reset_prefix_cache()
    history = Ask(0, 40, 0, 9, False, False, 0, None)
    first = family.engine.generate(history.prompt, history.params)[0]
    ids = (*first.prompt_token_ids, *first.outputs[0].token_ids, 33, 34, 35)
    second = family.engine.generate(TokensPrompt(ids), history.params)[0]
    # The first turn computed all of its tokens but the last.
    computed = len(first.prompt_token_ids) + 8
    assert second.num_cached_tokens == computed // BLOCK_SIZE * BLOCK_SIZE
    family.engine.check_integrity()
