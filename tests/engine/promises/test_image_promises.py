"""Cached equals uncached with images, on pools and encoder caches that run short.

Chunks of at most 16 tokens end inside images; the encoder cache holds two and a half of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import EngineConfig, LLMEngine
from prefix_cache import EncoderCacheStats
from tests.support.examples import examples
from tests.support.pictures import PLACEHOLDER, ImageAsk, image_scripts
from tests.support.request_stream import (
    BLOCK_SIZE,
    Alone,
    Script,
    alone_with,
    assert_busy,
    run_stream,
)

MAX_TEXT = 16
ROW_BYTES = 64 * 4
# Prefills of other lengths add up in another order: one of 1,280 hidden values was 1.0014e-5 apart.
ROUNDING = 1e-5  # of what a value is, beside as much for any
# Rows of the encoder cache, rows of a step, and blocks of the pool.
LIMITS = {"llava": (40, 20, 20), "qwen2_5_vl": (15, 7, 14)}


@dataclass(frozen=True)
class Family:
    name: str
    placeholder: int
    engine: LLMEngine
    alone: Alone


@pytest.fixture(
    scope="module",
    params=[(name, preemption) for name in LIMITS for preemption in ("recompute", "swap")],
    ids=lambda param: "-".join(param),
)
def family(request: pytest.FixtureRequest, seeded: Callable[[str], str]) -> Family:
    name: str = request.param[0]
    preemption: Literal["recompute", "swap"] = request.param[1]
    cache_rows, encoder_rows, num_blocks = LIMITS[name]
    engine = LLMEngine(
        EngineConfig(
            model=seeded(name),
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_num_encoder_tokens=encoder_rows,
            encoder_cache_bytes=cache_rows * ROW_BYTES,
            preemption=preemption,
        )
    )
    assert engine.tokenizer is not None
    placeholder = int(engine.tokenizer.convert_tokens_to_ids(PLACEHOLDER[name]))
    return Family(name, placeholder, engine, alone_with(seeded(name), rtol=ROUNDING))


def ask(family: Family, number: int, picture: int, max_tokens: int, num_pictures: int) -> ImageAsk:
    length = 4 + number % 8
    return ImageAsk(
        family=number % 2,
        length=length,
        tail=number,
        max_tokens=max_tokens,
        as_embeds=False,
        seeded=False,
        priority=0,
        salt=None,
        placeholder=family.placeholder,
        shown=((2, picture), (length, (picture + 1) % 4))[:num_pictures],
    )


def encoder_stats(engine: LLMEngine) -> EncoderCacheStats:
    stats = engine.stats().encoder_cache
    assert stats is not None
    return stats


@settings(max_examples=examples(40))
@given(data=st.data())
def test_random_streams_equal_uncached_and_conserve_items(
    family: Family, data: st.DataObject
) -> None:
    script = data.draw(image_scripts(family.placeholder, MAX_TEXT))
    run_stream(family.engine, script, family.alone)
    assert encoder_stats(family.engine).held_bytes == 0


def test_streams_do_hit_evict_and_preempt(family: Family) -> None:
    """Else the property above would prove nothing."""
    two_each: Script = [("add", ask(family, number, number % 4, 9, 2)) for number in range(10)]
    growing: Script = [("add", ask(family, number, 0, 24, 1)) for number in range(8)]
    before = family.engine.stats()
    run_stream(family.engine, [*two_each, *two_each, *growing], family.alone)
    assert_busy(before, family.engine.stats())
