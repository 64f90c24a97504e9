"""A server in a separate process, started as by users, for the benchmarks over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

_READY_TIMEOUT_S = 300.0
_POLL_INTERVAL_S = 0.25


class Served:
    """A process of ``omni serve`` on a free port; entering waits until its models are loaded.

    Args:
        config: name of a shipped pipeline, a file, or a mapping with a YAML file's content.
        flags: additional flags of ``omni serve``.
    """

    def __init__(self, config: str | Mapping[str, Any], flags: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="omni-served-")
        if not isinstance(config, str):
            file = Path(self._folder.name) / "pipeline.yaml"
            file.write_text(yaml.safe_dump(dict(config)), "utf-8")
            config = str(file)
        self._command = [sys.executable, "-m", "omni", "serve", config, "--port", "0", *flags]
        self.url = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert self._process.stderr is not None
        while not (
            found := re.search(r" at (http://\S+)$", line := self._process.stderr.readline())
        ):
            if not line:
                raise RuntimeError(f"omni serve ended with status {self._process.wait()}")
            if found is None:
                print(line, end="", file=sys.stderr)
        self.url = found.group(1)
        # Later output must not fill the pipe.
        threading.Thread(target=self._pass_on, daemon=True).start()
        end = time.monotonic() + _READY_TIMEOUT_S
        while self._get("/health")["status"] != "ready":
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError("the server does not become ready")
            time.sleep(0.1)
        self._processes = [self.process, *self.process.children(recursive=True)]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._folder.cleanup()

    @property
    def process(self) -> psutil.Process:
        """The server's process."""
        return psutil.Process(self._process.pid)

    def rss(self) -> int:
        """Return the resident bytes of the server and the processes that it had when it became
        ready; shared memory is counted for each."""
        return sum(int(each.memory_info().rss) for each in self._processes if each.is_running())

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)
        return sum(map(float, values))

    def held_blocks(self) -> int:
        """Return the number of large pages held by requests."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return sum(
            int(float(value))
            for value in re.findall(r'^omni_stage_blocks{.*state="held".*} (\S+)$', text, re.M)
        )

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return json.loads(error.read())

    def _pass_on(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            print(line, end="", file=sys.stderr)


class MemoryWatch:
    """Samples a server's memory periodically in a thread.

    Args:
        served: the server.

    Attributes:
        samples: seconds since the start, and bytes.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self.samples: list[tuple[float, int]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def peaks(self) -> tuple[int, int]:
        """Return the maximum bytes in the second and in the last quarter of the time."""
        end = self.samples[-1][0]
        second = [size for at, size in self.samples if end / 4 <= at < end / 2]
        last = [size for at, size in self.samples if at >= end * 3 / 4]
        return max(second), max(last)

    def _watch(self) -> None:
        began = time.monotonic()
        while not self._is_over.wait(_POLL_INTERVAL_S):
            self.samples.append((time.monotonic() - began, self._served.rss()))
