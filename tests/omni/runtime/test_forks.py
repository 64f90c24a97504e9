"""In a fork nothing hangs: what the parent built refuses to work there, and lets the child exit.

Forks are made by a separate process. Should a child hang all the same, it reports where and exits,
so that nobody waits for its output forever.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.import_graph import ROOT
from tests.support.patience import PATIENCE_S

# The beginning of each fork's child.
GUARD = f"import faulthandler; faulthandler.dump_traceback_later({PATIENCE_S / 4}, exit=True)"
# The engine has run, so that the thread pools that a fork loses exist; and when it forks, threads
# that the child does not have hold every lock that any thread may hold then.
SCRIPT = """
import os, sys, threading, warnings
from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt
from engine.interface import ownership
from engine.text import tokenizer as tokenizers
from omni import Omni, Pipeline
from tests.support.fake_stage import FakeStage

warnings.simplefilter("ignore", DeprecationWarning)  # that forks and threads do not go together
config = EngineConfig(model=sys.argv[1], num_blocks=16, block_size=4, max_model_len=32)
engine, prompt = LLMEngine(config), TokensPrompt((5, 6, 7))
params = SamplingParams(temperature=0.0, max_tokens=3)
said = engine.generate(prompt, params)[0].outputs[0].token_ids
omni = Omni(Pipeline([FakeStage("a", steps=10**9)]))
stream = omni.stream("x")
next(stream)

def hold(lock, is_held, may_go):
    with lock:
        is_held.release()
        may_go.wait()

is_held, may_go = threading.Semaphore(0), threading.Event()
locks = [
    omni._driver._changed,
    omni.pipeline.ownership._claiming,
    ownership._OBJECT_LOCKS.lock_of(omni),
    ownership._OBJECT_LOCKS._adding,
    tokenizers._PROCESSES._lock,
]
for lock in locks:
    threading.Thread(target=hold, args=(lock, is_held, may_go), daemon=True).start()
for lock in locks:
    is_held.acquire()

child = os.fork()
if not child:
    GUARD
    for call in (
        lambda: omni.generate("y"),
        lambda: next(omni.stream("y")),
        lambda: omni.paused().__enter__(),
        lambda: omni.abort("x"),
        lambda: Omni(omni.pipeline),
        lambda: engine.generate(prompt, params),
        lambda: engine.step(),
        lambda: next(engine.stream(prompt)),
    ):
        try:
            call()
        except RuntimeError as error:
            assert "cannot be used in its fork" in str(error), error
        else:
            os._exit(3)
    engine.abort("z")
    engine.close()
    omni.close()
    with Omni(Pipeline([FakeStage("b")])) as own:  # one's own works
        assert own.generate("y")[0].stages["b"].text == "b(y)"
    with ownership.turn_of(omni):
        stream.close()
    # All that is ours to end; what libraries do at the end of a fork is theirs.
    for each in tokenizers._PROCESSES._idle:
        each.close()
    os._exit(5)

may_go.set()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 5, status
assert engine.generate(prompt, params)[0].outputs[0].token_ids == said
assert not next(stream).finished, "the parent goes on"
stream.close()
omni.close()
print("done")
""".replace("GUARD", GUARD)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks are for POSIX")
def test_a_fork_is_refused_in_a_sentence_and_the_parent_goes_on(
    seeded: Callable[[str], str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, seeded("qwen2")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    assert "Traceback" not in done.stderr
