"""``omni serve`` as it is installed beside, and what clients read of the environment."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of ``chat`` and ``spoken_sums``."""
    omni = os.environ.get("OMNI", str(ROOT / ".venv/bin/omni"))
    command = [omni, "serve", str(ROOT / "clients/chat.yaml"), "spoken_sums", "--port", "0"]
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
