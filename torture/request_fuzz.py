"""Feeds hostile pipeline files, request lines, requests and chat templates to their readers.

Every input is generated from its number (``torture/hostile_inputs.py``), and processed in a
separate process per kind with a watchdog: without output for two minutes it hangs. An input must be
accepted, or refused alone by an error of this project; for requests that run, valid requests in the
same batch must have the same output as alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stderr
from importlib import resources
from pathlib import Path
from random import Random

from engine.text.tokenizer import TemplateLimits, render_chat
from omni import EngineConfig, Omni, OmniRequest, Pipeline, SamplingParams
from omni.pipelines.config_file import ConfigError, shipped_configs
from omni.pipelines.pipeline_config import PipelineConfig
from omni.requests.request_file import RequestError, read_requests
from omni.seeded.checkpoints import resolve_model
from stages import AutoregressiveStage
from torture.hostile_inputs import (
    hostile_line,
    hostile_prompt,
    hostile_sampling,
    hostile_template,
    hostile_yaml,
    make_traps,
)
from torture.outcome_table import Tally

KINDS = {"yaml": 6000, "lines": 3000, "requests": 1500, "templates": 500}
"""Default number of inputs of each kind."""

WHAT = {
    "yaml": "pipelines' files",
    "lines": "request lines",
    "requests": "requests that run",
    "templates": "chat templates",
}
_PER_PROCESS = 500
_TIMEOUT_S = 120.0
_MAX_MB = 1500.0
_NEIGHBOURS = ("Once upon a time", "The quick brown fox")
_TIGHT = TemplateLimits(max_chars=100_000, seconds=0.3, num_bytes=2**28)


def take_yaml(numbers: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Load pipeline files; yield the outcome and details of each."""
    folder = resources.files("stage_configs")
    texts = [(folder / f"{name}.yaml").read_text("utf-8") for name in shipped_configs()]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "hostile.yaml"
        for number in numbers:
            file.write_bytes(hostile_yaml(number, texts))
            try:
                PipelineConfig.load(file)
            except ConfigError:
                yield "failed alone", ""
            except Exception as error:
                yield "wrong", f"{type(error).__name__}: {error}"
            else:
                yield "went on", ""


def take_lines(numbers: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Read request lines, each between two valid ones; yield the outcomes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_traps(folder)
        file = folder / "requests.jsonl"
        own = SamplingParams()
        for number in numbers:
            good = [f'{{"request_id": "{name}", "prompt": "x"}}'.encode() for name in "ab"]
            file.write_bytes(b"\n".join((good[0], hostile_line(number), good[1])))
            try:
                entries = read_requests(file, {"writer": own, "reader": own})
            except Exception as error:
                yield "wrong", f"{type(error).__name__}: {error}"
                continue
            first, last, between = entries[0], entries[-1], entries[1:-1]
            whole = all(isinstance(each, OmniRequest) for each in (first, last))
            if not whole or [first.request_id, last.request_id] != ["a", "b"]:
                yield "wrong", "a good line beside it was not read"
            elif any(isinstance(each, RequestError) for each in between):
                yield "failed alone", ""
            else:
                yield "went on", ""


def take_requests(numbers: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Run requests together with valid ones; yield the outcomes."""
    config = EngineConfig(
        model=resolve_model("seeded:qwen2"), block_size=4, num_blocks=128, max_model_len=64
    )
    stage = AutoregressiveStage(
        "writer", config, sampling=SamplingParams(temperature=0.0, max_tokens=6)
    )
    logging.disable(logging.ERROR)  # each failure is logged with its traceback
    with Omni(Pipeline([stage])) as omni:
        alone = [output.stages["writer"].token_ids for output in omni.generate([*_NEIGHBOURS])]
        for start in range(0, len(numbers), 4):
            some = numbers[start : start + 4]
            requests: list[OmniRequest] = []
            refused = 0
            for number in some:
                random = Random(number)
                try:
                    sampling = {"writer": hostile_sampling(random)}
                    requests.append(OmniRequest(hostile_prompt(random), sampling=sampling))
                except ValueError:
                    refused += 1
            try:
                outputs = omni.generate([_NEIGHBOURS[0], *requests, _NEIGHBOURS[1]])
            except Exception as error:
                yield from [("wrong", f"{type(error).__name__}: {error}")] * len(some)
                return
            found = [output.stages["writer"].token_ids for output in (outputs[0], outputs[-1])]
            with omni.paused() as pipeline:
                pipeline.stages["writer"].check_integrity()
            yield from [("failed alone", "")] * refused
            for output in outputs[1:-1]:
                if found != alone:
                    yield "wrong", f"a neighbour gave {found} and not {alone}"
                else:
                    yield "went on" if output.error is None else "failed alone", ""


def take_templates(numbers: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Render chat templates; yield the outcomes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("seeded:qwen2"))
    for number in numbers:
        tokenizer.chat_template = hostile_template(number)
        try:
            render_chat(tokenizer, [{"role": "user", "content": "Who?"}], limits=_TIGHT)
        except ValueError:
            yield "failed alone", ""
        except Exception as error:
            yield "wrong", f"{type(error).__name__}: {error}"
        else:
            yield "went on", ""


TAKERS = {
    "yaml": take_yaml,
    "lines": take_lines,
    "requests": take_requests,
    "templates": take_templates,
}


def work(kind: str, first: int, num: int) -> None:
    """Process inputs in this process; print a line for each."""
    with ExitStack() as quiet:
        quiet.enter_context(redirect_stderr(quiet.enter_context(open(os.devnull, "w"))))
        for outcome, detail in TAKERS[kind](range(first, first + num)):
            print(f"{outcome}\t{' '.join(detail.split())[:300]}", flush=True)


def watch(kind: str, first: int, num: int, tally: Tally) -> None:
    """Process inputs in a separate process, and count their outcomes and its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torture.request_fuzz", "--work", kind, str(first), str(num)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    hangs = threading.Event()

    def end() -> None:
        hangs.set()
        process.kill()

    done = 0
    while done < num:
        # Inputs of kind "requests" are processed in groups of four.
        timer = threading.Timer(_TIMEOUT_S, end)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if not line:
            break
        outcome, _, detail = line.rstrip("\n").partition("\t")
        tally.add(outcome, f"{kind} {first + done}: {detail}")
        done += 1
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    peak_mb = usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
    tally.peak_mb = max(tally.peak_mb or 0.0, peak_mb)
    if done < num:
        what = "hangs" if hangs.is_set() else "wrong"
        tally.add(what, f"{kind} {first + done}: the process ended with status {status}")
    if peak_mb > _MAX_MB:
        tally.add("wrong", f"{kind} {first} to {first + num}: {peak_mb:.0f} MB")


def main() -> int:
    """Process inputs of every kind; return 1 if any outcome is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first input")
    for kind, num in KINDS.items():
        parser.add_argument(f"--{kind}", type=int, default=num, help=f"how many {WHAT[kind]}")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        kind, first, num = given.work
        work(kind, int(first), int(num))
        return 0
    tallies = []
    for kind in KINDS:
        tally = Tally(WHAT[kind])
        tallies.append(tally)
        left, first = getattr(given, kind), given.seed
        while left > 0:
            some = min(left, _PER_PROCESS)
            watch(kind, first, some, tally)
            left, first = left - some, first + some
        print(tally.row(), file=sys.stderr, flush=True)
    return Tally.report(tallies)


if __name__ == "__main__":
    sys.exit(main())
