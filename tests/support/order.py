"""In which order a run begins its tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from tests.support.import_graph import ROOT

__all__ = ["FIRST", "first_things_first"]

FIRST = (
    "omni/commands/test_cli_ray.py",
    "omni/runtime/test_ray.py",
    "omni/runtime/test_ray_direct.py",
    "omni/runtime/test_omni_promises.py",
    "omni/server/test_worker_deaths.py",
    "omni/runtime/test_processes.py",
    "omni/runtime/test_dying_workers.py",
    "omni/runtime/test_orchestrator.py",
    "omni/runtime/test_streaming_failures.py",
    "omni/runtime/test_streaming.py",
    "omni/commands/test_cli_processes.py",
    "omni/commands/test_killed_runs.py",
    "omni/commands/test_own_code.py",
    "stages/remote/test_worker_process.py",
    "engine/scheduling/test_admission_order.py",
    "omni/commands/test_demo.py",
    "test_readme.py",
    "omni/spoken_sums/test_spoken_sums.py",
)
"""Files of ``tests`` whose tests wait for other processes, or take longest.

One worker of pytest-xdist gets them, since workers get what lies together, and the others, of which
there are as many as cores, have enough to do while it waits. None of them is left for the end, when
the others have nothing more to do.
"""


class _Item(Protocol):
    @property
    def path(self) -> Path: ...


_AnyItem = TypeVar("_AnyItem", bound=_Item)


def first_things_first(items: Sequence[_AnyItem]) -> list[_AnyItem]:
    """Tests with those of :data:`FIRST` before all others, and else as they were."""
    places = {ROOT / "tests" / name: place for place, name in enumerate(FIRST)}
    return sorted(items, key=lambda item: places.get(item.path, len(places)))
