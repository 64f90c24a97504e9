"""``omni serve`` as it is installed beside, and what clients read of the environment."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Generator, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ALIASES = {"gpt-5.6-luna": "chat", "gpt-realtime-2.1": "spoken_sums"}
"""What OpenAI's Agents SDK asks for where an agent names no model, and what is served for it."""

_HEAD = "| client | what works |\n|---|---|\n"
_results: dict[str, dict[str, bool]] = {}  # by package, and by what was tried


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "client(package): the client that tests are of")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", action="store_true", help="write the results to docs/serving.md")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what works with which client, in the words of the test's name."""
    report = yield
    client = item.get_closest_marker("client")
    if client is not None and (report.when == "call" or report.failed):
        tried = item.name.partition("[")[0].removeprefix("test_").replace("_", " ")
        of = _results.setdefault(client.args[0], {})
        of[tried] = of.get(tried, True) and report.passed
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the rows of the clients that were tried; others keep theirs."""
    if not session.config.option.table:
        return
    page = ROOT / "docs/serving.md"
    before, after = page.read_text("utf-8").split(_HEAD)
    rows, rest = after.split("\n\n", 1)
    kept = {row.split("`")[1]: row for row in rows.split("\n") if row}
    for package, of in _results.items():
        result = "; ".join(what if works else f"**fails**: {what}" for what, works in of.items())
        kept[package] = f"| `{package}` {version(package)} | {result} |"
    table = "\n".join(row for _, row in sorted(kept.items()))
    page.write_text(f"{before}{_HEAD}{table}\n\n{rest}", "utf-8")


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the pipelines beside this file, and of ``spoken_sums``."""
    omni = os.environ.get("OMNI", str(ROOT / ".venv/bin/omni"))
    files = map(str, sorted(ROOT.glob("clients/*.yaml")))
    aliases = [f"--alias={name}={pipeline}" for name, pipeline in ALIASES.items()]
    command = [omni, "serve", *files, "spoken_sums", "--transcriber=ears", *aliases, "--port=0"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    while "\nready" not in (printed := log.read_text()):
        if server.poll() is not None:
            pytest.fail(f"the server ended:\n{printed}")
        time.sleep(0.1)
    address = re.search(r"http://\S+", printed)
    assert address is not None
    os.environ["OPENAI_BASE_URL"] = f"{address[0]}/v1"
    os.environ["OPENAI_API_KEY"] = "none"
    os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    yield f"{address[0]}/v1"
    server.terminate()
    assert server.wait(60) == 0
    assert "Traceback" not in log.read_text()


@pytest.fixture(autouse=True)
def _served(url: str) -> None:
    """All tests talk to the server."""
