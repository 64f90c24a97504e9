"""Reports of memory before it is reserved, and refused plans. No model is needed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from engine import EngineConfig, LLMEngine
from engine.resources.memory_plan import (
    MemoryPlan,
    ModelNeeds,
    format_bytes,
    plan_memory,
    report_kv_cache,
    step_bytes,
)
from prefix_cache import (
    CrossAttentionSpec,
    FullAttentionSpec,
    HostOnlySpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
)

FULL = FullAttentionSpec(16, 8, 128, torch.bfloat16)  # 64 KiB a layer
SLIDING = SlidingWindowSpec(16, 8, 128, torch.bfloat16, window=4096)
MAMBA = MambaSpec(16, (StateTensor((280, 512), torch.float32),))  # 560 KiB a layer


def group(spec: FullAttentionSpec | SlidingWindowSpec | MambaSpec, count: int) -> KVCacheGroup:
    return KVCacheGroup(tuple(f"{type(spec).__name__}.{i}" for i in range(count)), spec)


HALF_SLIDING = (group(SLIDING, 4), group(FULL, 4))
JAMBA = (group(MAMBA, 7), group(FULL, 1))


def planned(
    groups: tuple[KVCacheGroup, ...], longest: int, **settings: object
) -> tuple[KVCacheConfig, MemoryPlan]:
    return plan_memory(
        EngineConfig.model_validate({"model": "none", **settings}),
        ModelNeeds(groups, weights_bytes=0, dtype=torch.bfloat16, max_model_len=longest),
        device=torch.device("cpu"),
        attention="torch",
    )


def test_a_pool_on_a_gpu_leaves_memory_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * 2**30, 80 * 2**30))

    def num_blocks(memory_fraction: float) -> int:
        config = EngineConfig(model="none", memory_fraction=memory_fraction)
        taken = step_bytes(config, 3584, 152064, torch.bfloat16)
        assert taken == 2048 * 24 * 3584 * 2 + 16 * 40 * 152064
        needs = ModelNeeds((group(FULL, 28),), 0, torch.bfloat16, 32768, step_bytes=taken)
        cuda = torch.device("cuda:0")
        cache, _ = plan_memory(config, needs, device=cuda, attention="triton")
        free = 10 * 2**30 - cache.num_large_pages * cache.large_page_bytes
        assert free >= taken
        return cache.num_large_pages

    assert num_blocks(1.0) > num_blocks(0.9) > num_blocks(0.5)
    config = EngineConfig(model="none", memory_fraction=1.0)
    needs = ModelNeeds((group(FULL, 28),), 0, torch.bfloat16, 32768, step_bytes=20 * 2**30)
    with pytest.raises(
        ValueError, match=r"free memory but for 20.0 GiB that a step .*fit: lower max_"
    ):
        plan_memory(config, needs, device=torch.device("cuda:0"), attention="triton")


def free_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    reported = SimpleNamespace(available=num_bytes)
    monkeypatch.setattr("engine.resources.memory_plan.psutil.virtual_memory", lambda: reported)


def test_one_full_attention_group_is_reported_in_blocks_and_tokens() -> None:
    _, plan = planned((group(FULL, 2),), 100, num_blocks=9)
    assert plan.lines() == [
        "weights        0 B (bfloat16 on cpu)",
        "KV cache       1.1 MiB: 9 blocks of 16 tokens, 128.0 KiB each",
        "  room         128 tokens; sequences up to 100",
        "  group        2 layers, full attention: 128.0 KiB a page of 16 tokens, 8192 in a GiB",
        "  per token    8.0 KiB at every length",
        "attention      torch",
    ]


def test_windows_are_reported_with_their_savings() -> None:
    _, plan = planned(HALF_SLIDING, 8192, num_blocks=1 + 3 * 768)
    assert plan.lines()[1:-1] == [
        "KV cache       576.2 MiB: 2305 large pages, 256.0 KiB each",
        "  room         for the pages of 3.0 sequences of 8192 tokens",
        "  group        4 layers, sliding window of 4096: 256.0 KiB a page of 16 tokens; "
        "1 in a large page, 4096 in a GiB",
        "  group        4 layers, full attention: 256.0 KiB a page of 16 tokens; "
        "1 in a large page, 4096 in a GiB",
        "  per token    32.0 KiB at 1024 tokens, 24.0 KiB at 8192 tokens, of one request",
        "  one size     would hold 32.0 KiB at 8192 tokens; "
        "wasted: 0.0% at 1024 tokens (here 0.0%), 25.0% at 8192 tokens (here 0.0%)",
    ]


def test_costs_are_reported_at_a_short_and_a_long_context() -> None:
    for longest, lengths in ((1, [1]), (10, [2, 10]), (1024, [128, 1024]), (9999, [1024, 9999])):
        report = report_kv_cache(KVCacheConfig(2, HALF_SLIDING), longest)
        assert [cost.num_tokens for cost in report.costs] == lengths


def test_states_are_reported_with_padding_and_pages_per_large_page() -> None:
    padded = (KVCacheGroup(JAMBA[0].layer_names, MAMBA, 7 * 16 * 1024), JAMBA[1])
    config, plan = planned(padded, 1024, num_blocks=4)
    assert config.large_page_bytes == 63 * 64 * 1024  # 63 pages of attention, one state
    lines = plan.lines()
    assert (
        "  group        7 layers, recurrent: 3.9 MiB a page of one state, 112.0 KiB of it padding; "
        "1 in a large page, 260 in a GiB"
    ) in lines
    assert (
        "  group        1 layer, full attention: 64.0 KiB a page of 16 tokens; "
        "63 in a large page, 16384 in a GiB"
    ) in lines


def test_rows_of_models_without_full_attention_are_kept_on_the_host() -> None:
    groups = (group(SLIDING, 4), KVCacheGroup((), HostOnlySpec(16)))
    config, plan = planned(groups, 8192, num_blocks=600, max_num_seqs=2)
    assert config.num_host_blocks == 2 * 512 + 1
    assert "  group        no layers, on the host: 1025 blocks for outputs" in plan.lines()


def test_a_report_counts_encoder_tokens_of_cross_attention() -> None:
    cross = CrossAttentionSpec(1, 8, 128, torch.bfloat16)
    full = FullAttentionSpec(1, 8, 128, torch.bfloat16)
    groups = (
        KVCacheGroup(tuple(f"cross.{i}" for i in range(8)), cross),
        KVCacheGroup(tuple(f"self.{i}" for i in range(32)), full),
    )
    report = report_kv_cache(KVCacheConfig(2, groups), 43, num_encoder_tokens=6193)
    cost = report.costs[-1]
    assert (cost.waste, round(cost.one_size_waste, 3)) == (0.0, 0.796)


def test_a_length_that_does_not_fit_is_refused_with_one_that_does() -> None:
    pattern = r"max_model_len 8192 needs 897 blocks .* max_model_len (\d+) would fit, or set"
    with pytest.raises(ValueError, match=pattern) as error:
        planned(HALF_SLIDING, 8192, num_blocks=601, max_model_len=8192)
    assert str(error.value).endswith("set num_blocks to at least 898")
    planned(HALF_SLIDING, 8192, num_blocks=898, max_model_len=8192)
    fits = int(str(error.value).split(" would fit")[0].split()[-1])
    config, _ = planned(HALF_SLIDING, fits, num_blocks=601, max_model_len=fits)
    manager = KVCacheManager(config, max_num_batched_tokens=2048)
    assert manager.fits(fits) and not manager.fits(fits + 1)
    with pytest.raises(ValueError, match=f"max_model_len {fits} would fit"):
        planned(HALF_SLIDING, fits + 1, num_blocks=601, max_model_len=fits + 1)


def test_a_default_length_may_exceed_the_pool() -> None:
    config, _ = planned(HALF_SLIDING, 8192, num_blocks=601)
    assert config.num_large_pages == 601


def test_a_pool_that_holds_no_sequence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not one token would fit: set num_blocks to at least"):
        planned(HALF_SLIDING, 8192, num_blocks=2)
    free_memory(monkeypatch, 300 * 2**20)
    with pytest.raises(ValueError, match=r"max_model_len \d+ would fit, or raise memory_fraction"):
        planned(HALF_SLIDING, 8192, memory_fraction=0.5)
    free_memory(monkeypatch, 3 * 2**20)  # a state takes 3.8 MiB
    with pytest.raises(ValueError, match="not one token would fit: raise memory_fraction"):
        planned(JAMBA, 1024)


def test_a_window_smaller_than_a_block_is_refused_at_start(seeded: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match="smaller than a block of 32: set block_size to at most"):
        LLMEngine(EngineConfig(model=seeded("gemma2"), block_size=32))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**41, "2048.0 GiB"),
    ],
)
def test_bytes_are_formatted(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_an_engine_reports_encoder_cache_and_swap_space(
    seeded: Callable[[str], str],
) -> None:
    """Promise 8: sizes are reported."""
    config = EngineConfig(
        model=seeded("llava"), num_blocks=9, preemption="swap", encoder_cache_bytes=3 * 2**20
    )
    plan = LLMEngine(config).memory_plan
    assert plan.swap_bytes == 9 * plan.page_bytes
    lines = "\n".join(plan.lines())
    assert "encoder cache  up to 3.0 MiB of the KV cache, in pages of 4.0 KiB" in lines
    assert "swap space" in lines
    plain = LLMEngine(EngineConfig(model=seeded("qwen2"), num_blocks=9)).memory_plan
    assert not any(word in line for line in plain.lines() for word in ("encoder cache", "swap"))


def test_more_blocks_than_memory_are_refused_before_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free_memory(monkeypatch, 128 * 1024 * 9)
    planned((group(FULL, 2),), 100, num_blocks=9)
    with pytest.raises(ValueError, match="num_blocks 10 of 128.0 KiB each take 1.2 MiB, but cpu "):
        planned((group(FULL, 2),), 100, num_blocks=10)
    with pytest.raises(ValueError, match="set num_blocks to at most 9, or leave it out for "):
        planned((group(FULL, 2),), 100, num_blocks=99_999_999)
