"""What a KV cache of several kinds of layers costs, for people."""

from __future__ import annotations

from dataclasses import dataclass

from engine.resources.byte_sizes import format_bytes
from prefix_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    MambaSpec,
    needed_bytes,
    one_size_groups,
    request_bytes,
    spec_in_words,
)

__all__ = ["ContextCost", "KVCacheReport", "report_kv_cache"]

# Tokens of a short context; or an eighth of the longest, where that is less.
_SHORT_CONTEXT = 1024
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ContextCost:
    """What one request holds at one length, while its last token runs.

    Attributes:
        num_tokens: the length.
        needed_bytes: of the keys, values and states that this token works with.
        held_bytes: of the pages that these lie in.
        one_size_bytes: of the pages that an allocator with pages of one size would hold.
    """

    num_tokens: int
    needed_bytes: int
    held_bytes: int
    one_size_bytes: int

    @property
    def waste(self) -> float:
        """Share of what is held that is not needed."""
        return 1 - self.needed_bytes / self.held_bytes

    @property
    def one_size_waste(self) -> float:
        """The same for pages of one size."""
        return 1 - self.needed_bytes / self.one_size_bytes


@dataclass(frozen=True, slots=True)
class KVCacheReport:
    """The groups of a cache, and what they cost against pages of one size.

    Attributes:
        config: groups and pages.
        costs: of one request, at growing lengths.
    """

    config: KVCacheConfig
    costs: tuple[ContextCost, ...]

    @property
    def is_uniform(self) -> bool:
        """Whether there is nothing but full attention in one group."""
        return [type(group.spec) for group in self.config.groups] == [FullAttentionSpec]

    def lines(self) -> list[str]:
        """The report, a line for each group and what follows from them."""
        if self.is_uniform:
            group = self.config.groups[0]
            page_bytes, block_size = group.page_bytes, group.spec.block_size
            return [
                f"  group        {_layers(group)}, {spec_in_words(group.spec)}: "
                f"{format_bytes(page_bytes)} a page of {block_size} tokens, "
                f"{_GIB // page_bytes} in a GiB",
                f"  per token    {format_bytes(page_bytes // block_size)} at every length",
            ]
        short, long = self.costs[0], self.costs[-1]
        per_token = dict.fromkeys(
            f"{format_bytes(cost.held_bytes // cost.num_tokens)} at {cost.num_tokens} tokens"
            for cost in self.costs
        )
        wastes = dict.fromkeys(
            f"{cost.one_size_waste:.1%} at {cost.num_tokens} tokens (here {cost.waste:.1%})"
            for cost in (short, long)
        )
        return [
            *(f"  group        {self._group_line(i)}" for i in range(len(self.config.groups))),
            f"  per token    {', '.join(per_token)}, of one request",
            f"  one size     would hold "
            f"{format_bytes(long.one_size_bytes // long.num_tokens)} at {long.num_tokens} tokens; "
            f"wasted: {', '.join(wastes)}",
        ]

    def _group_line(self, group_id: int) -> str:
        group = self.config.groups[group_id]
        spec = group.spec
        if not group.on_device:
            return f"no layers, on the host: {self.config.num_host_blocks} blocks for outputs"
        kind = spec_in_words(spec)
        holds = "one state" if isinstance(spec, MambaSpec) else f"{spec.block_size} tokens"
        padding = f", {format_bytes(group.padding_bytes)} of it padding" * bool(group.padding_bytes)
        return (
            f"{_layers(group)}, {kind}: {format_bytes(group.page_bytes)} a page of "
            f"{holds}{padding}; {self.config.pages_per_large_page(group_id)} in a large page, "
            f"{_GIB // group.page_bytes} in a GiB"
        )


def report_kv_cache(
    config: KVCacheConfig, max_model_len: int, num_encoder_tokens: int = 0
) -> KVCacheReport:
    """Work out what requests will hold; reserves nothing.

    Args:
        config: groups and pages.
        max_model_len: longest sequence; costs are told for it, and for a short one.
        num_encoder_tokens: that each request brings along, for cross-attention.
    """
    ours = _probe(config.groups)
    one_size = _probe(one_size_groups(config.groups))
    lengths = sorted({min(_SHORT_CONTEXT, -(-max_model_len // 8)), max_model_len})
    costs = tuple(
        ContextCost(
            n,
            needed_bytes(config.groups, n, num_encoder_tokens),
            request_bytes(ours, n, num_encoder_tokens),
            request_bytes(one_size, n, num_encoder_tokens),
        )
        for n in lengths
    )
    return KVCacheReport(config, costs)


def _probe(groups: tuple[KVCacheGroup, ...]) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig(2, groups, num_host_blocks=2))


def _layers(group: KVCacheGroup) -> str:
    count = len(group.layer_names)
    return f"{count} layer{'s' * (count != 1)}"
