"""Filled pages are read in groups, on a device that gathers them; ``meta`` is such a device."""

from __future__ import annotations

import torch

from engine.execution.model_runner import FilledPage, PageContents
from prefix_cache import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    PagedMemory,
)


def test_a_group_without_filled_pages_adds_nothing_on_a_device_that_gathers():
    groups = (
        KVCacheGroup(("decoder.self",), FullAttentionSpec(4, 2, 8, torch.float16)),
        KVCacheGroup(("decoder.cross",), CrossAttentionSpec(4, 2, 8, torch.float16)),
    )
    contents = PageContents(PagedMemory(KVCacheConfig(8, groups), "meta"))
    gathered = contents.numbers([FilledPage(0, 1, 3), FilledPage(0, 1, 5)])
    assert [each.shape[0] for each in gathered] == [2]
