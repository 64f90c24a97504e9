"""Stages that a failure has left in a state that nobody knows, and how they are built anew."""

from __future__ import annotations

import logging
import traceback
from collections import Counter

from stages import Stage

__all__ = ["MOST_REBUILDS", "BrokenStages"]

_logger = logging.getLogger(__name__)

MOST_REBUILDS = 3
"""How often in a row a stage is built anew without finishing any request in between."""


class BrokenStages:
    """Builds broken stages anew, as long as there is hope.

    ::

        works ──► broken ──► built anew ──► finishes a request: works
                    ▲             └──► broken ──► ... at most ``MOST_REBUILDS`` times in a row
                    └── cannot be built: tried again when a request comes, as often
    """

    def __init__(self) -> None:
        self._causes: dict[str, str] = {}
        self._num_rebuilds: Counter[str] = Counter()
        self._hopeless: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._causes

    def note(self, stage: Stage, error: Exception) -> None:
        """Take note that a stage cannot go on; its first error is the one that is told."""
        _logger.error("stage %r cannot go on", stage.name, exc_info=error)
        self._causes.setdefault(stage.name, f"{type(error).__name__}: {error}")
        # The frames of a traceback that somebody keeps would keep the model's memory.
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__

    def note_success(self, stage: Stage) -> None:
        """Take note that a stage has finished a request."""
        self._num_rebuilds.pop(stage.name, None)

    def rebuild(self, stage: Stage) -> str:
        """Build a broken stage anew, which frees what it holds.

        Returns:
            What to tell the requests that were in it.

        Raises:
            ValueError: it cannot be built, now or ever; says why.
        """
        name, cause = stage.name, self._causes[stage.name]
        if name in self._hopeless:
            raise ValueError(self._hopeless[name])
        self._num_rebuilds[name] += 1
        count = self._num_rebuilds[name]
        if count > MOST_REBUILDS:
            self._give_up(stage, f"it broke {count} times in a row, the last time by {cause}")
        _logger.warning(
            "stage %r is built anew, since it broke (%s): %d of at most %d times in a row",
            *(name, cause, count, MOST_REBUILDS),
        )
        try:
            stage.rebuild()
        except NotImplementedError as error:
            self._give_up(stage, f"it broke ({cause}) and cannot be built anew: {error}")
        except Exception as error:  # whatever building a model raises; memory may come free later
            _logger.error("stage %r could not be built anew", name, exc_info=error)
            raise ValueError(
                f"it broke ({cause}) and could not be built anew: {type(error).__name__}: {error}"
            ) from error
        del self._causes[name]
        return f"it broke while it had this request, and was built anew: ask again ({cause})"

    def _give_up(self, stage: Stage, why: str) -> None:
        told = f"it cannot be used any more: {why}; build the pipeline anew"
        self._hopeless[stage.name] = told
        _logger.error("stage %r: %s", stage.name, told)
        raise ValueError(told)
