"""The order in which pytest-xdist workers begin their tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeVar

from tests.support.import_graph import ROOT

FIRST = (
    "omni/commands/test_cli_ray.py",
    "omni/runtime/test_processes.py",
    "omni/commands/test_cli_processes.py",
    "omni/runtime/test_ray.py",
    "omni/runtime/test_omni_promises.py",
    "test_readme.py",
    "stages/remote/test_fork_server.py",
    "omni/commands/test_demo.py",
    "omni/runtime/test_chaos.py",
    "omni/server/test_worker_deaths.py",
    "omni/spoken_sums/test_spoken_sums.py",
    "omni/runtime/test_streaming_failures.py",
    "omni/runtime/test_ray_direct.py",
    "omni/commands/test_own_code.py",
    "omni/runtime/test_orchestrator.py",
    "engine/models/test_model_families.py",
    "omni/runtime/test_streaming.py",
    "omni/runtime/test_dying_workers.py",
    "engine/faults/test_interrupted_steps.py",
)
"""Files of ``tests`` that wait for other processes or take longest, the longest first.

At the end of a run they would leave cores idle.
"""


class _Item(Protocol):
    @property
    def path(self) -> Path: ...


_AnyItem = TypeVar("_AnyItem", bound=_Item)


def first_things_first(items: Sequence[_AnyItem], num_workers: int) -> list[_AnyItem]:
    """Order tests so that each worker of pytest-xdist begins with its share of :data:`FIRST`.

    With ``--dist=worksteal`` the first worker gets the first tests, and so on; a worker that has
    none left takes from the end of another's.
    """
    places = {ROOT / "tests" / name: place for place, name in enumerate(FIRST)}
    files = [list(file) for _, file in groupby(items, key=lambda item: item.path)]
    first = [file for file in files if file[0].path in places]
    first.sort(key=lambda file: places[file[0].path])
    rest = [item for file in files if file[0].path not in places for item in file]
    ordered: list[_AnyItem] = []
    for worker in range(num_workers):
        end = len(items) * (worker + 1) // num_workers
        ordered += [item for file in first[worker::num_workers] for item in file]
        num_more = max(0, end - len(ordered))
        ordered += rest[:num_more]
        del rest[:num_more]
    return ordered + rest
