"""An orchestrator for tests that check whole outputs, as users get them."""

from __future__ import annotations

from omni.requests.request import OmniAccumulator, OmniDelta, OmniOutput
from omni.runtime import orchestrator


class WholeOrchestrator(orchestrator.Orchestrator):
    """Returns accumulated outputs instead of deltas."""

    _so_far: dict[str, OmniAccumulator] | None = None

    def step(self) -> list[OmniOutput]:  # type: ignore[override]
        return [self._output(delta) for delta in super().step()]

    def abort(self, request_id: str, reason: str = "aborted") -> OmniOutput | None:  # type: ignore[override]
        delta = super().abort(request_id, reason)
        return None if delta is None else self._output(delta)

    def _output(self, delta: OmniDelta) -> OmniOutput:
        if self._so_far is None:
            self._so_far = {}
        if delta.request_id not in self._so_far:
            self._so_far[delta.request_id] = OmniAccumulator(self._pipeline.final_stages)
        so_far = self._so_far[delta.request_id]
        so_far.add(delta)
        if delta.finished:
            del self._so_far[delta.request_id]
        return so_far.output()
