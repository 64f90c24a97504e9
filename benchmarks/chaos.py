"""Whatever happens to workers: every request ends, and says what it would have said undisturbed.

    python benchmarks/chaos.py [--config omni_speech] [--requests 2000] [--faults 100] [--seed 0]

Requests run through a pipeline in processes, some at a time, while workers get SIGKILL and SIGSTOP
at random moments. Every output is compared with that of the same request undisturbed and inline:
token ids, texts and finish reasons are equal, tensors and sound nearly (1e-4). Counted before and
after: processes, descriptors, and names in /dev/shm.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from omni import Omni, OmniOutput, OmniRequest
from omni.pipelines.pipeline_config import PipelineConfig
from stages.remote.remote_stage import RemoteStage

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "rivers", "run")
_AT_A_TIME = 16
_TOLERANCE = 1e-4


@dataclass
class Outcome:
    """What came of the requests.

    Attributes:
        kinds: how many were equal, failed, or differed.
        errors: of those that failed, how often each was told.
        faults: how often each signal was sent.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


def prompts(count: int, seed: int) -> list[str]:
    """Prompts of which many share their beginnings."""
    rng = random.Random(seed)
    beginnings = [" ".join(rng.choices(_WORDS, k=6)) for _ in range(8)]
    return [f"{rng.choice(beginnings)} {' '.join(rng.choices(_WORDS, k=3))}" for _ in range(count)]


def difference(found: OmniOutput, expected: OmniOutput) -> str | None:
    """Where two outputs differ; None if they are the same."""
    for name, theirs in expected.stages.items():
        ours = found.stages[name]
        for told in ("token_ids", "text", "finish_reason"):
            if getattr(ours, told) != getattr(theirs, told):
                return f"{name}.{told}"
        pairs = [(ours.tensors[each], rows) for each, rows in theirs.tensors.items()]
        if theirs.audio is not None and ours.audio is not None:
            pairs.append((ours.audio.samples, theirs.audio.samples))
        for one, other in pairs:
            if one.shape != other.shape or not torch.allclose(one, other, atol=_TOLERANCE):
                return f"{name}: tensors"
    return None


def disturb(omni: Omni, faults: int, seed: int, is_over: threading.Event, seen: Outcome) -> None:
    """Send signals to workers at random moments, until all are sent or the requests have ended."""
    rng = random.Random(seed)
    stages = [each for each in omni.pipeline.stages.values() if isinstance(each, RemoteStage)]
    while sum(seen.faults.values()) < faults and not is_over.wait(rng.uniform(0.02, 0.4)):
        pid = rng.choice(rng.choice(stages).workers).pid
        if pid is None:
            continue
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        seen.faults[number.name] += 1


def left_behind() -> dict[str, int]:
    """What a run could leave: processes below this one, descriptors, names of shared memory."""
    own = os.getpid()
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words[0] != "Z":
            parents[int(stat.parent.name)] = int(words[1])
    ours = {own}
    for _ in range(4):
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    return {
        "processes": len(ours) - 1,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared": len(os.listdir("/dev/shm")),
    }


def run(omni: Omni, asked: Sequence[str], expected: dict[str, OmniOutput], seen: Outcome) -> None:
    """Run all requests, some at a time, and compare what comes of them."""
    for start in range(0, len(asked), _AT_A_TIME):
        batch = asked[start : start + _AT_A_TIME]
        requests = [OmniRequest(prompt, f"r{start + at}") for at, prompt in enumerate(batch)]
        for prompt, output in zip(batch, omni.generate(requests), strict=True):
            if output.error is not None:
                seen.kinds["failed"] += 1
                seen.errors[output.error] += 1
                continue
            where = difference(output, expected[prompt])
            seen.kinds["equal" if where is None else f"differs in {where}"] += 1


def main() -> int:
    """Run from the command line; 0 if every request ended and equals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", default="omni_speech")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    asked = prompts(arguments.requests, arguments.seed)
    with Omni(arguments.config) as inline:
        different = list(dict.fromkeys(asked))
        expected = dict(zip(different, inline.generate(different), strict=True))
    overrides = {"runtime.kind": "processes", "runtime.max_retries": 1000}
    config = PipelineConfig.load(arguments.config, overrides | {"runtime.stall_timeout_s": 2.0})
    with Omni(config) as omni:  # the process that workers are forked from stays
        omni.generate(asked[0])
    before = left_behind()
    seen, is_over = Outcome(), threading.Event()
    began = time.monotonic()
    with Omni(config) as omni:
        disturber = threading.Thread(
            target=disturb, args=(omni, arguments.faults, arguments.seed, is_over, seen)
        )
        disturber.start()
        run(omni, asked, expected, seen)
        is_over.set()
        disturber.join()
        with omni.paused() as pipeline:
            for stage in pipeline.stages.values():
                stage.check_integrity()
    after = left_behind()
    print(f"{arguments.requests} requests, {dict(seen.faults)}: {time.monotonic() - began:.0f} s")
    print(f"outcomes: {dict(seen.kinds)}")
    for error, count in seen.errors.most_common(5):
        print(f"  {count} x {error}")
    print(f"before {before}, after {after}")
    is_clean = all(after[what] <= count for what, count in before.items())
    return 0 if is_clean and seen.kinds == {"equal": arguments.requests} else 1


if __name__ == "__main__":
    sys.exit(main())
