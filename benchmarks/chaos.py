"""Whatever happens to workers: every request ends, and says what it would have said undisturbed.

    python -m benchmarks.chaos [--config omni_speech] [--requests 2000] [--faults 100] [--seed 0]
    python -m benchmarks.chaos --runtime ray --faults 10 --kinds sigkill

Several callers stream requests through a pipeline in processes, or in the actors of a Ray cluster,
while its workers get SIGKILL, SIGSTOP and exceptions in the middle of their steps, spread evenly
over the requests. Every output is compared with that of the same prompt undisturbed and inline:
token ids, texts and finish reasons are equal, tensors and sound nearly (1e-4), and what was told
piece by piece adds up to it. Now and then, and in the end, every worker checks that it has
lost nothing. Counted before and after: processes, threads, descriptors, and names in /dev/shm.

A request may be run again as often as it takes: with few requests many faults meet the same one.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.faulty_stages import faulty, throw
from omni import Omni, OmniOutput, OmniRequest
from omni.pipelines.pipeline_config import PipelineConfig
from stages.remote.remote_stage import RemoteStage

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "rivers", "run")
_SHORT = {
    "stages.thinker.sampling.max_tokens": 12,
    "stages.talker.sampling.max_tokens": 20,
    "stages.code2wav.generation.num_steps": 2,
}
"""What lets thousands of requests of the default pipeline end within minutes."""

_CALLERS, _AT_ONCE = 4, 4
_DIFFERENT = 160
_TOLERANCE = 1e-4
_EXCEPTION = "exception"
_FAULTS = ("SIGKILL", "SIGKILL", _EXCEPTION, _EXCEPTION, "SIGSTOP")
_KINDS = {kind.lower(): kind for kind in _FAULTS}


@dataclass
class Outcome:
    """What came of the requests.

    Attributes:
        seed: of what happens when.
        kinds: how many were equal, failed, or differed.
        errors: of those that failed, how often each was told.
        faults: how often each was sent.
        lost: what workers said that have lost something.
        num_checks: how often they found that they had not.
    """

    seed: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    num_checks: int = 0

    @property
    def num_ended(self) -> int:
        """Requests that came to an end."""
        return sum(self.kinds.values())


def prompts(count: int, seed: int) -> list[str]:
    """Prompts of which many share their beginnings."""
    rng = random.Random(seed)
    beginnings = [" ".join(rng.choices(_WORDS, k=6)) for _ in range(8)]
    different = [
        f"{rng.choice(beginnings)} {' '.join(rng.choices(_WORDS, k=3))}" for _ in range(_DIFFERENT)
    ]
    return rng.choices(different, k=count)


def difference(found: Sequence[OmniOutput], expected: OmniOutput) -> str | None:
    """Where a request's outputs differ from what it should say; None if they do not."""
    last = found[-1]
    for name, theirs in expected.stages.items():
        ours = last.stages[name]
        for told in ("token_ids", "text", "finish_reason"):
            if getattr(ours, told) != getattr(theirs, told):
                return f"{name}.{told}"
        pieces = [output.stages[name] for output in found if name in output.stages]
        if ours.text is not None and "".join(piece.delta for piece in pieces) != ours.text:
            return f"{name}: pieces of text"
        pairs = [(ours.tensors[each], rows) for each, rows in theirs.tensors.items()]
        if theirs.audio is not None and ours.audio is not None:
            heard = [each.audio_delta.samples for each in pieces if each.audio_delta is not None]
            pairs.append((ours.audio.samples, theirs.audio.samples))
            pairs.append((torch.cat(heard), ours.audio.samples))
        for one, other in pairs:
            if one.shape != other.shape or not torch.allclose(one, other, atol=_TOLERANCE):
                return f"{name}: tensors"
    return None


class Disturber:
    """Does things to workers while requests run.

    Args:
        omni: runs them.
        num_faults: how many faults there are to be until all requests have ended.
        num_requests: how many there are.
        seen: is told, and seeds what happens when.
        faults: what is chosen from; what stands there twice is chosen twice as often.
    """

    def __init__(
        self,
        omni: Omni,
        num_faults: int,
        num_requests: int,
        seen: Outcome,
        faults: Sequence[str] = _FAULTS,
    ) -> None:
        self._omni, self._seen, self._faults = omni, seen, faults
        self._num_faults, self._num_requests = num_faults, num_requests
        self._rng = random.Random(seen.seed)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disturber")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        for number in range(self._num_faults):
            # The last one comes while there are requests left.
            while self._seen.num_ended * (self._num_faults + 1) < number * self._num_requests:
                if self._is_over.wait(0.01):
                    return
            self._is_over.wait(self._rng.uniform(0, 0.1))
            if number % 5 == 0:
                check(self._omni, self._seen)
            self._disturb()

    def _disturb(self) -> None:
        while not self._is_over.is_set():
            stage = self._omni.pipeline.stages[self._rng.choice(self._omni.pipeline.order)]
            assert isinstance(stage, RemoteStage)
            pid = self._rng.choice(stage.workers).pid
            fault = self._rng.choice(self._faults)
            if pid is not None:
                with suppress(ProcessLookupError):  # it has just ended, or has not begun yet
                    if fault == _EXCEPTION:
                        throw(pid)
                    else:
                        os.kill(pid, signal.Signals[fault])
                    self._seen.faults[fault] += 1
                    return
            self._is_over.wait(0.01)


def check(omni: Omni, seen: Outcome) -> None:
    """Let the workers that are up look whether they have lost anything."""
    for stage in omni.pipeline.stages.values():
        try:
            stage.check_integrity()
            seen.num_checks += 1
        except RuntimeError as error:
            # One that ends meanwhile has nothing to lose.
            if "its worker" not in str(error):
                seen.lost.append(str(error))


def left_behind() -> dict[str, int]:
    """What a run could leave: processes below this one, threads, descriptors, shared memory."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words[0] != "Z":
            parents[int(stat.parent.name)] = int(words[1])
    ours = {os.getpid()}
    for _ in range(4):
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    return {
        "processes": len(ours) - 1,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared": len(os.listdir("/dev/shm")),
    }


def run(omni: Omni, asked: Sequence[str], expected: dict[str, OmniOutput], seen: Outcome) -> None:
    """Stream all requests, by several callers at once, and compare what comes of them."""
    counting = threading.Lock()

    def call(start: int) -> None:
        for outputs in streamed(omni, asked, start):
            last = outputs[-1]
            prompt = asked[int(last.request_id.removeprefix("r"))]
            where = None if last.error is not None else difference(outputs, expected[prompt])
            with counting:
                if last.error is not None:
                    seen.kinds["failed"] += 1
                    seen.errors[last.error] += 1
                else:
                    seen.kinds["equal" if where is None else f"differs in {where}"] += 1

    with ThreadPoolExecutor(_CALLERS) as callers:
        for done in [callers.submit(call, at) for at in range(0, len(asked), _AT_ONCE)]:
            done.result()


def streamed(omni: Omni, asked: Sequence[str], start: int) -> Iterator[list[OmniOutput]]:
    """The outputs of some requests, of each as it ends."""
    batch = [
        OmniRequest(prompt, f"r{start + at}")
        for at, prompt in enumerate(asked[start : start + _AT_ONCE])
    ]
    outputs: dict[str, list[OmniOutput]] = {str(each.request_id): [] for each in batch}
    for output in omni.stream(batch):
        outputs[output.request_id].append(output)
        if output.finished:
            yield outputs.pop(output.request_id)


def main() -> int:
    """Run from the command line; 0 if every request ended and equals, and nothing is left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", default="omni_speech")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=sorted(_KINDS), help="of faults; else all")
    parser.add_argument("--runtime", choices=("processes", "ray"), default="processes")
    arguments = parser.parse_args()
    asked = prompts(arguments.requests, arguments.seed)
    short = _SHORT if arguments.config == "omni_speech" else {}
    plain = PipelineConfig.load(arguments.config, short)
    with Omni(plain) as inline:
        different = list(dict.fromkeys(asked))
        expected = dict(zip(different, inline.generate(different), strict=True))
    overrides = {
        "runtime.kind": arguments.runtime,
        "runtime.max_retries": 1000,
        "runtime.stall_timeout_s": 2.0,
    }
    config = faulty(PipelineConfig.load(arguments.config, short | overrides))
    with Omni(config) as omni:  # the process that workers are forked from stays
        omni.generate(asked[0])
    before = left_behind()
    seen, began = Outcome(arguments.seed), time.monotonic()
    with Omni(config) as omni:
        kinds = [_KINDS[kind] for kind in arguments.kinds] if arguments.kinds else _FAULTS
        with Disturber(omni, arguments.faults, arguments.requests, seen, kinds):
            run(omni, asked, expected, seen)
        run(omni, asked[:1], expected, Outcome())  # until every worker is up again
        num_before, num_stages = seen.num_checks, len(omni.pipeline.order)
        check(omni, seen)
        is_whole = seen.num_checks == num_before + num_stages and not seen.lost
    after = left_behind()
    seconds = time.monotonic() - began
    print(f"{arguments.requests} requests, faults {dict(seen.faults)}: {seconds:.0f} s")
    print(f"outcomes: {dict(seen.kinds)}")
    for error, count in seen.errors.most_common(5):
        print(f"  {count} x {error}")
    print(f"workers that had lost nothing: {seen.num_checks}; lost: {seen.lost}")
    print(f"before {before}, after {after}")
    if arguments.runtime == "ray":
        # Ray keeps one or two closed sockets of every cluster that a process has been in, also
        # where nothing but ray.init and ray.shutdown was called.
        before["descriptors"] += 2
    is_clean = all(after[what] <= count for what, count in before.items())
    is_equal = seen.kinds == {"equal": arguments.requests}
    return 0 if is_whole and is_clean and is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
