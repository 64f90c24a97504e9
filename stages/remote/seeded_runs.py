"""Seeds for requests that may have to run twice."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from stages.remote.control import StageFacts
from stages.worker.messages import Enter

if TYPE_CHECKING:
    from engine.interface.request_seeds import RequestSeeds

__all__ = ["SeededRuns"]


class SeededRuns:
    """Gives requests the seeds that their stage would have given them.

    It must be told here: a second run, maybe in another worker, has to draw the same tokens.
    """

    def __init__(self) -> None:
        self._seeds: RequestSeeds | None = None

    def seeded(self, enter: Enter, facts: StageFacts | None) -> Enter:
        """The same request, with a seed if tokens are drawn for it and it brings none.

        Args:
            enter: in the order in which they come.
            facts: of the stage; None if it could never be built.
        """
        params = enter.sampling or (facts.sampling if facts is not None else None)
        if params is None or params.seed is not None:
            return enter
        seed = self._draw(None if facts is None else facts.seed)
        if params.is_greedy:  # its engine would have drawn one for it, too
            return enter
        return replace(enter, sampling=params.model_copy(update={"seed": seed}))

    def _draw(self, seed: int | None) -> int:
        if seed is None:
            return secrets.randbits(62)
        if self._seeds is None:
            from engine.interface.request_seeds import RequestSeeds  # only who draws needs torch

            self._seeds = RequestSeeds(seed)
        return self._seeds.draw()
