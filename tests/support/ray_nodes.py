"""Three nodes of a Ray cluster on this machine; a program.

    python -m tests.support.ray_nodes PROGRAM FOLDER

Each has an object store, so that data sent between actors on different nodes is copied.
The driver is on the first, which is the head.

Args:
    PROGRAM: what Ray uses as Python.
    FOLDER: for all files of Ray; its file :data:`ADDRESS` holds the cluster's address once all
        nodes are up.
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
"""Size limit of data that Ray sends inline instead of storing it: more than a heartbeat with all
its counters, and less than the rows of tests. Ray's default is three times that."""

_LOOKED_EACH_MS = 20
"""A read that missed its object's arrival checks again after that long. Ray's default is a second,
and one in a hundred reads of other nodes' objects as small as the tests' misses it.
"""

_NODE: dict[str, Any] = {
    "num_cpus": 64,
    "object_store_memory": _STORE_BYTES,
    "include_log_monitor": False,
}
_HEAD: dict[str, Any] = {
    "num_gpus": 4,
    # No test needs these processes, and each of them takes half a second to start.
    "no_monitor": True,
    "include_dashboard": False,
    "_system_config": {
        "max_direct_call_object_size": _MOST_INLINE_BYTES,
        "get_check_signal_interval_milliseconds": _LOOKED_EACH_MS,
    },
}


def main(program: str, folder: str) -> None:
    """Run the nodes until this process is ended."""
    sys.executable = program
    os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    from ray.cluster_utils import Cluster  # which reads the environment

    cluster: Any = Cluster(initialize_head=True, head_node_args=_NODE | _HEAD)
    for _ in range(1, _NUM_NODES):
        cluster.add_node(wait=False, **_NODE)
    cluster.wait_for_nodes()
    written = Path(folder, f"{ADDRESS}.new")
    written.write_text(cluster.address)
    written.rename(Path(folder, ADDRESS))  # appears only when complete
    # They end with this process. Ray's own handler would first wait for each node's processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
