"""The tests' cluster's Python: has a worker forked, and acts as Python for everything else.

python -I -S ray_nursery_client.py ADDRESS ARGUMENT...
"""

import json
import os
import socket
import sys

NUM_FDS = 3
_SETS_UP_WORKERS = "setup_worker.py"


def main(address: str, *arguments: str) -> None:
    """Ask the nursery at an address, or run Python with these arguments in this process."""
    if not arguments or os.path.basename(arguments[0]) != _SETS_UP_WORKERS:
        os.execv(sys.executable, [sys.executable, *arguments])
    asked = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect(address)
        socket.send_fds(nursery, [b"\0"], range(NUM_FDS))
        nursery.sendall(f"{json.dumps(asked)}\n".encode())
        status = nursery.recv(16)
    sys.exit(int(status or b"1") % 256)


if __name__ == "__main__":
    main(*sys.argv[1:])
