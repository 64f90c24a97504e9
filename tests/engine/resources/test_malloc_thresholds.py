"""glibc's thresholds, in a process of their own: they are process-wide."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Frees and asks again for 20 MiB, as a prefill's activations are; counts page faults of the second.
SCRIPT = """
import ctypes, resource, sys
from engine.resources.device import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
if sys.argv[1] == "keep":
    keep_freed_memory()
else:
    libc.mallopt(-3, 128 << 10)
def use():
    block = libc.malloc(20 << 20)
    ctypes.memset(block, 1, 20 << 20)
    libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is on Linux")
def test_freed_memory_is_used_again_without_page_faults():
    faults = {}
    for mode in ("keep", "default"):
        command = [sys.executable, "-c", SCRIPT, mode]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        faults[mode] = int(done.stdout)
    # With transparent huge pages even the default faults rarely, so it is only compared with.
    assert faults["keep"] <= min(faults["default"], 10)
