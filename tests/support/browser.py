"""A headless Chromium, controlled over the DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
"""Path of the program; None if it is not installed."""

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-sync", "--no-first-run", "--remote-debugging-port=0", "--mute-audio"),
    *("--autoplay-policy=no-user-gesture-required", "--disable-component-update"),
    *("--disable-dev-shm-usage", "--window-size=1280,900"),
)


class Browser:
    """One page of a browser."""

    def __init__(self, folder: Path, microphone: Path | None = None) -> None:
        assert CHROMIUM is not None
        flags: tuple[str, ...] = _FLAGS
        if microphone is not None:
            flags += ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
            flags += (f"--use-file-for-fake-audio-capture={microphone}%noloop",)
        self._folder = folder
        self._process = subprocess.Popen(
            [CHROMIUM, *flags, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._number = 0
        self.problems: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._connection = connect(self._page_address(), max_size=2**26)
            self._socket = self._connection.__enter__()
            for domain in ("Page", "Runtime", "Log"):
                self.send(f"{domain}.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.__exit__(None, None, None)
        self._end()

    def open(self, url: str) -> Self:
        """Open a server's page as a first-time visitor."""
        self.send("Page.navigate", url="about:blank")
        self.send("Storage.clearDataForOrigin", origin=url, storageTypes="all")
        self.send("Emulation.clearDeviceMetricsOverride")
        self.send("Emulation.setEmulatedMedia", features=[])
        self.problems.clear()
        self.send("Page.navigate", url=f"{url}/")
        return self

    def send(self, method: str, **params: Any) -> Any:
        """Send a command; return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self._socket.send(json.dumps(message))
        while True:
            reported = json.loads(self._socket.recv(timeout=60))
            self._note(reported)
            if reported.get("id") == self._number:
                assert "error" not in reported, reported
                return reported["result"]

    def run(self, script: str) -> Any:
        """Evaluate an expression, awaiting it; return its value."""
        reported = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reported, reported
        return reported["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60) -> Any:
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"{script} never came true; {self.problems}"
            time.sleep(0.02)
        return value

    def press(self, key: str, code: str, number: int) -> None:
        """Press a key, given the character it types, its code on the keyboard, and its number."""
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=code if key == "\r" else key, code=code,
                text=key, windowsVirtualKeyCode=number,
            )  # fmt: skip

    def _note(self, reported: Any) -> None:
        params = reported.get("params", {})
        if reported.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        if reported.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(str(params["entry"]))

    def _page_address(self) -> str:
        where = self._folder / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not (where.exists() and where.read_text().count("\n")):
            assert self._process.poll() is None, "the browser has ended"
            assert time.monotonic() < end, "the browser does not start"
            time.sleep(0.02)
        port = where.read_text().splitlines()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=60) as answer:
            pages = json.loads(answer.read())
        return str(next(page for page in pages if page["type"] == "page")["webSocketDebuggerUrl"])

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
