"""What a program loads is not looked through for garbage, and no garbage is lost by that."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETTING = """\
import gc, weakref
from omni.runtime.uncollected import keep_for_good, let_age, uncollected

class Node:
    def __init__(self) -> None:
        self.itself = self  # so that only a collection finds it

"""
# In a process of its own: the one that tests run in has set its objects apart.
CASES = {
    "what was made meanwhile is old without having been looked through": """\
let_age()
before = gc.get_stats()[2]["collections"]
with uncollected():
    assert not gc.isenabled()
    made = Node()
assert gc.isenabled()
assert any(each is made for each in gc.get_objects(generation=2))
assert gc.get_stats()[2]["collections"] == before
""",
    "garbage that was made meanwhile is found by the next full collection": """\
with uncollected():
    found = weakref.ref(Node())
assert found() is not None
gc.collect()
assert found() is None
""",
    "who has collections off keeps them off": """\
gc.disable()
with uncollected():
    pass
assert not gc.isenabled()
""",
    "what stays for good does so": """\
let_age()
keep_for_good()
before = gc.get_freeze_count()
with uncollected():
    pass
assert gc.get_freeze_count() == before > 0
""",
    "objects that somebody set apart stay so": """\
gc.freeze()
before = gc.get_freeze_count()
with uncollected():
    pass
assert gc.isenabled() and gc.get_freeze_count() == before > 0
""",
}


@pytest.mark.parametrize("case", CASES)
def test_collections_are_kept_away_and_lose_nothing(case: str):
    subprocess.run([sys.executable, "-c", SETTING + CASES[case]], check=True)


@pytest.mark.parametrize("with_torch", [False, True])
def test_a_command_without_a_model_ends_without_a_last_look_for_garbage(with_torch: bool):
    code = (
        "import atexit, gc, sys, types\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"
        f"if {with_torch}:\n    sys.modules['torch'] = types.ModuleType('torch')\n"
        "from omni.__main__ import main\n"
        "sys.argv = ['omni', 'validate', 'two_step']\n"
        "main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    told = ["two_step: valid; stages: writer, reader", str(not with_torch)]
    assert ended.stdout.splitlines() == told
