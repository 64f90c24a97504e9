"""A stage that a failure has left in an unknown state, and how it is built anew."""

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
        self._failure: str | None = None
        self._is_hopeless = False

    @property
    def failure(self) -> str | None:
        """Why the stage could not be built anew when that was last tried; None if it could."""
        return self._failure

    @property
    def is_broken(self) -> bool:
        """Whether the stage cannot be used as it is."""
        return self._cause is not None

    def note(self, error: Exception, *, after: str | None = None) -> None:
        """Take note that the stage cannot go on; its first error is the one that is told.

        Args:
            error: what it raised.
            after: what it had raised before, from which this one came, if from any.
        """
        _logger.error("stage %r cannot go on", self._stage.name, exc_info=error)
        if self._cause is None:
            self._cause = f"{type(error).__name__}: {error}"
            if after is not None:
                self._cause += f" (after {after})"
        # A log or a caller may keep the traceback, whose frames would keep the model's memory.
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
        if self._is_hopeless:
            raise self._refusal()
        name, cause = self._stage.name, self._cause
        self._num_rebuilds += 1
        count = self._num_rebuilds
        if count > MOST_REBUILDS:
            raise self._give_up(f"it broke {count} times in a row, the last time by {cause}")
        _logger.warning(
            "stage %r is to be built anew, since it broke (%s): %d of at most %d times in a row",
            *(name, cause, count, MOST_REBUILDS),
        )
        try:
            self._stage.rebuild()
        except NotImplementedError as error:
            raise self._give_up(f"it broke by {cause} and cannot be built anew: {error}") from error
        except Exception as error:  # whatever building a model raises; memory may come free later
            _logger.error("stage %r could not be built anew", name, exc_info=error)
            told = f"{type(error).__name__}: {error}"
            self._failure = f"it broke by {cause} and could not be built anew: {told}"
            raise ValueError(self._failure) from error
        self._cause = self._failure = None
        return f"it broke while it had this request, and was built anew: ask again ({cause})"

    def _give_up(self, why: str) -> ValueError:
        self._failure, self._is_hopeless = why, True
        _logger.error("stage %r is of no use any more: %s", self._stage.name, why)
        return self._refusal()

    def _refusal(self) -> ValueError:
        return ValueError(f"it cannot be used any more: {self._failure}; build the pipeline anew")
