"""Three nodes of a Ray cluster on this machine; a program.

    python -m tests.support.ray_nodes PROGRAM FOLDER

Each has an object store, so that what goes from an actor on one to an actor on another is copied.
The driver is on the first, which is the head.

Args:
    PROGRAM: what Ray is to take for Python.
    FOLDER: for all that Ray writes; the cluster's address is in its file :data:`ADDRESS` when all
        nodes are there.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

ADDRESS = "address"
_NUM_NODES = 3

_STORE_BYTES = 128 * 2**20
_MOST_INLINE_BYTES = 32 * 2**10
"""Of what Ray sends along instead of placing it into a store: more than a heartbeat with all its
counters, and less than the rows of tests. By itself Ray takes three times that."""

_LOOKED_EACH_MS = 20
"""A read that has missed that its object has come looks again after that long. By itself Ray takes
a second, and of another node's objects one in a hundred that are as small as the tests' is missed.
"""

_NODE: dict[str, Any] = {
    "num_cpus": 64,
    "object_store_memory": _STORE_BYTES,
    "include_log_monitor": False,
}
_HEAD: dict[str, Any] = {
    "num_gpus": 4,
    # What these processes do, no test asks for, and each of them takes half a second to begin.
    "no_monitor": True,
    "include_dashboard": False,
    "_system_config": {
        "max_direct_call_object_size": _MOST_INLINE_BYTES,
        "get_check_signal_interval_milliseconds": _LOOKED_EACH_MS,
    },
}


def main(program: str, folder: str) -> None:
    """Have the nodes until somebody ends this process."""
    sys.executable = program
    os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    from ray.cluster_utils import Cluster  # which reads the environment

    cluster: Any = Cluster(initialize_head=True, head_node_args=_NODE | _HEAD)
    for _ in range(1, _NUM_NODES):
        cluster.add_node(wait=False, **_NODE)
    cluster.wait_for_nodes()
    written = Path(folder, f"{ADDRESS}.new")
    written.write_text(cluster.address)
    written.rename(Path(folder, ADDRESS))  # who finds it, finds all of it
    # They end with this process. Ray's own handler would first wait for what runs on each of them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
