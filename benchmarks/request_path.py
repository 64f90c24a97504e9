"""Lines and files of the packages, and the code that one request of two tokens runs.

Run it from a checkout::

    python -m benchmarks.request_path
    python -m benchmarks.request_path --show "http, processes"    # the files that it crosses

A request of two tokens (warm: two like it ran before) is traced through ``Omni`` in this process,
and through ``omni serve`` over HTTP with the stage in a separate process. ``sys.setprofile`` counts
Python calls into the four packages, their files, and how often two consecutive calls are in
different files, in all threads of all processes. A worker's heartbeats may add calls: the minimum
over several requests counts.

::

    request_path ── flag: on ──► shared bytes ◄── polled by every profiled process
                 ── request
                 ── flag: off        calls of each thread ──► one file each ──► counted here
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("omni", "stages", "engine", "prefix_cache")
PIPELINE = """\
name: writer
stages:
  writer: {kind: autoregressive, model: "seeded:qwen2", final_output: text}
"""
WAYS = {"in process": "inline", "http, processes": "processes"}

# Imported by Python at the start of every process that has its folder on the path.
_SITE = """\
import sys
sys.path.insert(0, {root!r})
from benchmarks.request_path import profile_calls
profile_calls({folder!r})
"""


def shared_flag(folder: Path) -> mmap.mmap:
    """Map a byte shared by all processes: non-zero if calls are recorded."""
    with (folder / "flag").open("r+b") as file:
        return mmap.mmap(file.fileno(), 1)


def profile_calls(folder: str) -> None:
    """Write every call into the packages to a file of its thread, while the flag is on."""
    flag = shared_flag(Path(folder))
    prefixes = tuple(f"{ROOT / package}{os.sep}" for package in PACKAGES)
    files: dict[tuple[int, int], int] = {}

    def note(frame: object, event: str, _: object) -> None:
        if event != "call" or not flag[0]:
            return
        code = frame.f_code  # type: ignore[attr-defined]
        if not code.co_filename.startswith(prefixes):
            return
        thread = os.getpid(), threading.get_ident()
        if thread not in files:
            name = f"{folder}/calls-{thread[0]}-{thread[1]}"
            files[thread] = os.open(name, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        line = f"{time.monotonic_ns()}\t{code.co_filename}\t{code.co_qualname}\n"
        os.write(files[thread], line.encode())

    threading.setprofile(note)
    sys.setprofile(note)


def ask(url: str) -> None:
    """Request two tokens from a server."""
    body = {"model": "writer", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi."}]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as answer:
        json.load(answer)


def in_process(config: str, ask_often: Callable[[Callable[[], object]], None]) -> None:
    """Send requests to a pipeline of this process."""
    from omni import Omni, OmniRequest, SamplingParams

    with Omni(config) as pipeline:
        request = OmniRequest("Hi.", sampling={"writer": SamplingParams(max_tokens=2)})
        ask_often(lambda: pipeline.generate([request]))


def over_http(config: str, ask_often: Callable[[Callable[[], object]], None]) -> None:
    """Send requests to a server whose stage is in a separate process."""
    from benchmarks.served import Served

    with Served(config, ["--runtime", "processes"]) as server:
        ask_often(lambda: ask(server.url))


def measure(way: str, folder: Path) -> list[list[str]]:
    """Send a few requests; return the calls of the shortest run, in order, as ``file, name``."""
    runs: list[list[str]] = []
    flag = shared_flag(folder)

    def ask_often(ask: Callable[[], object]) -> None:
        for number in range(7):
            time.sleep(0.3)
            flag[0] = number >= 2
            ask()
            time.sleep(0.05)
            flag[0] = 0
            found = list(folder.glob("calls-*"))
            lines = [line for file in found for line in file.read_text().splitlines()]
            runs.append(sorted(lines, key=lambda line: int(line.partition("\t")[0])))
            for file in found:
                os.truncate(file, 0)

    config = folder / "pipeline.yaml"
    config.write_text(PIPELINE)
    (in_process if WAYS[way] == "inline" else over_http)(str(config), ask_often)
    return [line.split("\t")[1:] for line in min(runs[2:], key=len)]


def show(way: str, calls: list[list[str]], names_files: bool) -> None:
    """Print the counts of a request."""
    files = Counter(str(Path(file).relative_to(ROOT)) for file, _ in calls)
    switches = sum(one[0] != other[0] for one, other in pairwise(calls))
    print(f"{way:<18}{len(files):>7} files{len(calls):>7} calls{switches:>7} switches")
    if names_files:
        for file, number in files.items():
            print(f"  {number:>5}  {file}")


def count_lines() -> None:
    """Print lines and files of the packages."""
    total = num_files = 0
    for package in PACKAGES:
        sources = sorted((ROOT / package).rglob("*.py"))
        lines = sum(len(source.read_text("utf-8").splitlines()) for source in sources)
        print(f"{package:<18}{len(sources):>7} files{lines:>7} lines")
        total, num_files = total + lines, num_files + len(sources)
    print(f"{'together':<18}{num_files:>7} files{total:>7} lines")


def main() -> None:
    """Print all counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--show", choices=WAYS, help="print the files that a request crosses")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        show(options.way, measure(options.way, options.folder), options.show == options.way)
        return
    count_lines()
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="omni-request-path-") as name:
            folder = Path(name)
            (folder / "flag").write_bytes(b"\0")
            site = folder / "site"
            site.mkdir()
            text = _SITE.format(root=str(ROOT), folder=name)
            (site / "sitecustomize.py").write_text(text)
            path = os.pathsep.join((str(site), str(ROOT)))
            module = "from benchmarks.request_path import main; main()"
            command = [sys.executable, "-c", module, "--way", way, "--folder", name]
            command += ["--show", options.show] if options.show else []
            subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
