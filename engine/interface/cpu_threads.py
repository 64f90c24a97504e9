"""CPU threads: the number for this process, and the wait policy of PyTorch's threads."""

from __future__ import annotations

import math
import os
from pathlib import Path

_PROC = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Return the cores that this process may use: its affinity, bounded by its cgroup's quota.

    A quota of 1.5 cores counts as 2.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def configure_openmp() -> None:
    """Set the defaults that PyTorch's OpenMP reads from the environment when it is loaded.

    Waiting threads sleep (``OMP_WAIT_POLICY=PASSIVE``) instead of spinning for milliseconds on a
    core that another program, or our own kernels' threads, could use. If a cgroup has a quota,
    ``OMP_NUM_THREADS`` is set, since OpenMP ignores quotas. The user's own settings are kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if cpu_quota() is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(available_cores()))


def cpu_quota(memberships: Path = _PROC, mount: Path = _MOUNT) -> float | None:
    """Return the CPU seconds per second that this process's cgroups allow; None without a limit.

    Reads version 2 (``cpu.max``) and version 1 (``cpu.cfs_quota_us``) of cgroups, and uses the
    smallest quota of the process's group and its ancestors.

    Args:
        memberships: the process's ``/proc/PID/cgroup``, lines of ``id:controllers:path``.
    """
    try:
        lines = memberships.read_text("utf-8").splitlines()
    except OSError:  # not Linux
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be the host's, which is not mounted here: the mount's root is
        # then the container's own group, and the last of the parents.
        root = mount / controllers if controllers else mount
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            quotas += _read_quotas(folder)
            if folder == root:
                break
    return min(quotas, default=None)


def _read_quotas(folder: Path) -> list[float]:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text("utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text("utf-8")
            period = (folder / "cpu.cfs_period_us").read_text("utf-8")
    except OSError:  # the root of the tree has no limit and no such file
        return []
    if quota == "max" or int(quota) <= 0:
        return []
    return [int(quota) / int(period)]
