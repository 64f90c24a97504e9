"""In which order a run's workers begin their tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeVar

from tests.support.import_graph import ROOT

__all__ = ["FIRST", "FORKING", "first_things_first"]

FIRST = (
    "omni/commands/test_cli_ray.py",
    "omni/runtime/test_processes.py",
    "omni/commands/test_cli_processes.py",
    "omni/runtime/test_ray.py",
    "omni/runtime/test_omni_promises.py",
    "test_readme.py",
    "stages/remote/test_worker_process.py",
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
    "omni/commands/test_killed_runs.py",
    "omni/runtime/test_dying_workers.py",
    "engine/faults/test_interrupted_steps.py",
)
"""Files of ``tests`` whose tests wait for other processes, or take longest; the longest ones first.

At the end they would leave cores without work: who waits, or runs the last of them, has nobody who
could take a part of it.
"""

FORKING = (
    "omni/runtime/test_omni_promises.py",
    "omni/runtime/test_omni_preemption.py",
    "omni/server/test_worker_deaths.py",
    "omni/server/test_transcriptions.py",
    "omni/runtime/test_composed_pipelines.py",
    "omni/server/test_metrics.py",
    "omni/runtime/test_timeline.py",
    "omni/server/test_http_server.py",
)
"""Files of ``tests`` that have stages run in processes, beside what is marked ``programs``.

Such processes are forked from one that has imported torch and transformers, which takes seconds,
and each worker of a run that needs one has its own: so the first worker gets all of these files.
"""


class _Item(Protocol):
    @property
    def path(self) -> Path: ...


_AnyItem = TypeVar("_AnyItem", bound=_Item)


def first_things_first(
    items: Sequence[_AnyItem], num_workers: int, together: Sequence[str] = ()
) -> list[_AnyItem]:
    """Tests in another order: each worker of pytest-xdist begins with its share of :data:`FIRST`.

    It deals tests out like cards that are not shuffled: to the first worker its share from the top,
    and so on; who is done takes from the end of another's.

    Args:
        items: files lie together.
        num_workers: 1 for a run without it.
        together: files of ``tests`` that the first worker begins with, before its share.
    """
    names = (*together, *(name for name in FIRST if name not in together))
    places = {ROOT / "tests" / name: place for place, name in enumerate(names)}
    files = [list(file) for _, file in groupby(items, key=lambda item: item.path)]
    first = [file for file in files if file[0].path in places]
    first.sort(key=lambda file: places[file[0].path])
    num_together = sum(places[file[0].path] < len(together) for file in first)
    shares = [first[num_together + worker :: num_workers] for worker in range(num_workers)]
    shares[0] = first[:num_together] + shares[0]
    rest = [item for file in files if file[0].path not in places for item in file]
    ordered: list[_AnyItem] = []
    for worker in range(num_workers):
        end = len(items) * (worker + 1) // num_workers
        ordered += [item for file in shares[worker] for item in file]
        num_more = max(0, end - len(ordered))
        ordered += rest[:num_more]
        del rest[:num_more]
    return ordered + rest
