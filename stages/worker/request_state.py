"""One request in one stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine import Prompt
from stages.stage import StageRequest
from stages.stage_output import OutputAccumulator
from stages.worker.chunk_cutter import ChunkCutter
from stages.worker.messages import Enter

__all__ = ["RequestState"]


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in one stage.

    ::

        entered ──► made ready ──► inside ──► rests, goes on ──► out

    Attributes:
        enter: the command that it came by.
        cutters: its chunks on every streamed edge that leaves the stage, by consumer.
        request: as the stage gets it; None before its prompt is made.
        is_inside: whether the stage has it.
        is_streamed: whether its prompt comes in chunks.
        pending: prompts made of the chunks that the stage has yet to take.
        so_far: what the stage has made of it, if chunks are cut from that, or its user gets none
            of it; else None.
        has_emitted: whether anything that the stage made of it was emitted.
        was_restarted: whether the stage broke under it before.
        has_cut: whether a chunk was cut since it was last decided if it should rest.
        is_paused: whether it rests, since a stage behind does not keep up.
    """

    enter: Enter
    cutters: Mapping[str, ChunkCutter]
    request: StageRequest | None = None
    is_inside: bool = False
    is_streamed: bool = False
    pending: deque[Prompt] = field(default_factory=deque)
    so_far: OutputAccumulator | None = None
    has_emitted: bool = False
    was_restarted: bool = False
    has_cut: bool = False
    is_paused: bool = False

    def begin_output(self, stage: str) -> None:
        """Begin to add up what the stage makes of it, from nothing, where that is needed."""
        if self.so_far is not None:
            self.so_far = OutputAccumulator(self.request_id, stage)

    @property
    def request_id(self) -> str:
        """The request's."""
        return self.enter.request_id

    @property
    def is_held_up(self) -> bool:
        """Whether its next chunks should wait."""
        return any(cutter.is_full for cutter in self.cutters.values())
