"""The one Ray cluster of a test run: three nodes, all on this machine."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from filelock import FileLock

from stages.cluster.membership import join
from tests.support import ray_head, ray_nodes
from tests.support.import_graph import ROOT
from tests.support.patience import wait_for
from tests.support.ray_relay import start_relay


class SessionCluster:
    """This process's share of it: the first user starts it, and it ends with the whole run."""

    def __init__(self, folder: Path) -> None:
        note = folder / "ray-cluster.json"
        with FileLock(folder / "ray-cluster.lock"):
            if not note.exists():
                note.write_text(json.dumps(_begin()))
        self.address: str
        self.environment: Mapping[str, str]
        self.program: str
        """The program that a cluster uses as Python, so that its actors come from the nursery."""
        self.address, self.environment, self.program = json.loads(note.read_text())
        with _set(self.environment):
            # Ray reads them when it is imported, as in any process started with them.
            raylet: Any = ray._raylet
            raylet.Config.initialize("")
            raylet.AuthenticationTokenLoader.instance().reset_cache()
            self._membership = join(self.address)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The ids of its nodes, this process's own first."""
        own = ray.get_runtime_context().get_node_id()
        others = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {own}
        return (own, *sorted(others))

    @cached_property
    def relay(self) -> Any:
        """An actor that forwards messages for workers that are threads of this process.

        It is on another node than this process.
        """
        return start_relay(self.nodes[1])

    def num_actors(self, pid: int) -> int:
        """Return the number of a process's live actors; other workers of the run have some, too."""
        jobs = {job["JobID"] for job in ray._private.state.jobs() if job["DriverPid"] == pid}
        listed = ray._private.state.actors().values()
        return sum(actor["State"] != "DEAD" and actor["JobID"] in jobs for actor in listed)

    @property
    def store_bytes(self) -> int:
        """Return how much of its object stores is in use, by any process."""
        total, free = ray.cluster_resources(), ray.available_resources()
        return int(total["object_store_memory"] - free["object_store_memory"])

    def stop(self) -> None:
        """Leave it; this process's actors end."""
        self._membership.leave()


def _begin() -> tuple[str, dict[str, str], str]:
    folder = tempfile.mkdtemp(prefix="omni-ray-", dir="/tmp")  # pytest's are too long for sockets
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    keeper = subprocess.Popen(
        [sys.executable, "-m", ray_head.__name__, str(run), folder],
        cwd=ROOT,
        env=os.environ | environment,
        start_new_session=True,
    )
    noted, nursery = Path(folder, ray_nodes.ADDRESS), Path(folder, ray_head.NURSERY)
    # An actor that does not start within Ray's minute is given up.
    wait_for(lambda: (noted.exists() and nursery.exists()) or keeper.poll() is not None)
    keeper.returncode = keeper.returncode or 0  # it outlives this process deliberately
    return noted.read_text(), environment, str(Path(folder, ray_head.PROGRAM))


@contextmanager
def _set(environment: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
