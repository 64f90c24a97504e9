"""What a group of layers keeps, in words."""

from __future__ import annotations

from prefix_cache.specs.kv_cache_spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    HostOnlySpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

__all__ = ["spec_in_words"]


def spec_in_words(spec: KVCacheSpec) -> str:
    """What layers of a spec keep, such as ``sliding window of 4096``.

    Raises:
        NotImplementedError: there are no words for such a spec here yet.
    """
    match spec:
        case SlidingWindowSpec():
            return f"sliding window of {spec.window}"
        case ChunkedLocalAttentionSpec():
            return f"attention in chunks of {spec.chunk_size}"
        case CrossAttentionSpec():
            return "cross-attention"
        case AttentionSpec():
            return "full attention"
        case MambaSpec():
            return "recurrent"
        case HostOnlySpec():
            return "on the host"
    raise NotImplementedError(f"no words for {type(spec).__name__}")
