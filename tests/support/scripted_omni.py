"""A pipeline without a model that echoes its prompts, for tests of the code around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch

from engine import FinishReason
from omni.requests.request import OmniOutput, OmniRequest
from stages import StageOutput, StageStats


class ScriptedOmni:
    """Stands in for ``Omni``; requests end in the reverse order, two at a time."""

    built = 0
    before: Callable[[int], object] = staticmethod(lambda _: None)

    def __init__(self, config: Any, *, trace: Any = None) -> None:
        type(self).built += 1

    def stream(self, requests: Sequence[OmniRequest]) -> Iterator[OmniOutput]:
        """Yield a last output of each."""
        order = [*requests[::-2], *requests[-2::-2]]
        for number, request in enumerate(order):
            type(self).before(number)
            assert request.request_id is not None
            yield OmniOutput(request.request_id, {}, finished=False)
            if "fail" in str(request.prompt):
                yield OmniOutput(request.request_id, {}, finished=True, error="as it was asked to")
                continue
            writer = StageOutput(
                request.request_id,
                "writer",
                finished=True,
                text="wrote",
                tensors={"hidden_states": torch.ones(2, 3)},
            )
            reader = StageOutput(
                request.request_id,
                "reader",
                finished=True,
                text=f"said {request.prompt}",
                token_ids=(1, 2),
                finish_reason=FinishReason.STOP,
            )
            stages = {"writer": writer, "reader": reader}
            yield OmniOutput(request.request_id, stages, finished=True)

    def stats(self) -> dict[str, StageStats]:
        """Return no stats."""
        return {"writer": StageStats(), "reader": StageStats()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...
