"""All levels of a measurement, for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omni.commands.bench.level_report import LevelReport

__all__ = ["BenchReport"]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All levels of a measurement.

    Attributes:
        target: what was measured, for people.
        settings: by which a run can be repeated: flags without dashes, and their values.
        levels: in the order in which they ran; the last one may be cut short.
        is_complete: whether all ran to their end.
    """

    target: str
    settings: Mapping[str, Any]
    levels: Sequence[LevelReport]
    is_complete: bool

    @property
    def has_failures(self) -> bool:
        """Whether a request failed, or none was answered. Status 429 alone is no failure."""
        counts = [level.requests for level in self.levels]
        return any(each.failed for each in counts) or not any(each.ok for each in counts)

    def save(self, path: Path) -> None:
        """Write all of it as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        content = {
            "omni_version": version("omni-pipeline"),
            "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "target": self.target,
            "settings": dict(self.settings),
            "is_complete": self.is_complete,
            "levels": [level.as_json() for level in self.levels],
        }
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", "utf-8")
