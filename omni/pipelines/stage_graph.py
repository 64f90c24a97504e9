"""The graph that stages form: which feeds which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

__all__ = ["topological_order"]


def topological_order(sources: Mapping[str, Sequence[str]]) -> list[str]:
    """Order stages so that each comes after all that feed it; otherwise as they were given.

    Args:
        sources: for every stage the stages that feed it; none for a root.

    Raises:
        ValueError: stages feed each other in a circle; the message names it.
    """
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for stage, feeding in sources.items():
        sorter.add(stage, *feeding)
    try:
        sorter.prepare()
    except CycleError as error:
        circle = " -> ".join(error.args[1])
        raise ValueError(f"stages feed each other in a circle: {circle}") from error
    # graphlib's own order within one rank is that of a set; the user's is the one to keep.
    depth: dict[str, int] = {}

    def depth_of(stage: str) -> int:
        if stage not in depth:
            depth[stage] = 1 + max((depth_of(source) for source in sources[stage]), default=-1)
        return depth[stage]

    return sorted(sources, key=depth_of)
