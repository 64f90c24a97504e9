"""A stage that a failure has left in a state that nobody knows, and how it is built anew."""

from __future__ import annotations

import traceback

from engine.interface.log_fields import package_logger
from stages.stage import Stage

__all__ = ["MOST_REBUILDS", "BrokenStage"]

_logger = package_logger(__name__)

MOST_REBUILDS = 3
"""How often in a row a stage is built anew without finishing any request in between."""


class BrokenStage:
    """Builds a stage anew when it broke, as long as there is hope.

    ::

        works ──► broken ──► built anew ──► finishes a request: works
                    ▲             └──► broken ──► ... at most ``MOST_REBUILDS`` times in a row
                    └── cannot be built: tried again when a request comes, as often

    Args:
        stage: whose state this is.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._cause: str | None = None
        self._num_rebuilds = 0
        self._hopeless: str | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the stage cannot be used as it is."""
        return self._cause is not None

    def note(self, error: Exception) -> None:
        """Take note that the stage cannot go on; its first error is the one that is told."""
        _logger.error("stage %r cannot go on", self._stage.name, exc_info=error)
        self._cause = self._cause or f"{type(error).__name__}: {error}"
        # The frames of a traceback that somebody keeps would keep the model's memory.
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__

    def note_success(self) -> None:
        """Take note that the stage has finished a request."""
        self._num_rebuilds = 0

    def rebuild(self) -> str:
        """Build the stage anew, which frees what it holds.

        Returns:
            What to tell the requests that were in it.

        Raises:
            ValueError: it cannot be built, now or ever; says why.
        """
        name, cause = self._stage.name, self._cause
        if self._hopeless is not None:
            raise ValueError(self._hopeless)
        self._num_rebuilds += 1
        count = self._num_rebuilds
        if count > MOST_REBUILDS:
            self._give_up(f"it broke {count} times in a row, the last time by {cause}")
        _logger.warning(
            "stage %r is built anew, since it broke (%s): %d of at most %d times in a row",
            *(name, cause, count, MOST_REBUILDS),
        )
        try:
            self._stage.rebuild()
        except NotImplementedError as error:
            self._give_up(f"it broke ({cause}) and cannot be built anew: {error}")
        except Exception as error:  # whatever building a model raises; memory may come free later
            _logger.error("stage %r could not be built anew", name, exc_info=error)
            raise ValueError(
                f"it broke ({cause}) and could not be built anew: {type(error).__name__}: {error}"
            ) from error
        self._cause = None
        return f"it broke while it had this request, and was built anew: ask again ({cause})"

    def _give_up(self, why: str) -> None:
        self._hopeless = f"it cannot be used any more: {why}; build the pipeline anew"
        _logger.error("stage %r: %s", self._stage.name, self._hopeless)
        raise ValueError(self._hopeless)
