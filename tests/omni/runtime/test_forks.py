"""In a fork nothing hangs: what the parent built refuses to work there, and lets the child end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from tests.support.import_graph import ROOT

# The engine has run, so that the pools of threads that a fork loses are there. While a request is
# on its way the driver's thread takes and gives its lock all the time: a child may get it locked.
SCRIPT = """
import atexit, os, sys, warnings
from engine import EngineConfig, LLMEngine, SamplingParams, TokensPrompt
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

child = os.fork()
if not child:
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
    atexit._run_exitfuncs()  # all that is ours to end; libraries' threads are not there to join
    os._exit(5)

_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 5, status
assert engine.generate(prompt, params)[0].outputs[0].token_ids == said
assert not next(stream).finished, "the parent goes on"
stream.close()
omni.close()
print("done")
"""


def test_a_fork_is_refused_in_a_sentence_and_the_parent_goes_on(
    seeded: Callable[[str], str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, seeded("qwen2")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    assert "Traceback" not in done.stderr
