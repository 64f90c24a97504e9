"""A Ray cluster is looked up without importing Ray, within seconds."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.cluster import cluster_address
from stages.cluster.cluster_address import check_answers, check_is_ray, find_cluster

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextmanager
def server(says: bytes | None) -> Iterator[str]:
    """Run a server that answers one caller; it never answers if ``says`` is None."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def answer() -> None:
            with suppress(OSError):  # on a busy machine the caller may give up before connecting
                caller, _ = listener.accept()
                with closing(caller):
                    caller.recv(1000)
                    if says is None:
                        caller.recv(1000)
                    else:
                        caller.sendall(says)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulate a machine without a cluster and a process outside any cluster."""
    monkeypatch.setattr(cluster_address, "_is_in_cluster", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def test_an_address_that_answers_like_ray_is_accepted() -> None:
    with server(SETTINGS) as address:
        assert find_cluster(address) == address


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\0\0"])
def test_an_address_with_another_answer_is_refused(says: bytes) -> None:
    with server(says) as address, pytest.raises(ValueError, match="what answers there is some"):
        find_cluster(address)


def test_a_silent_address_is_refused_after_a_timeout() -> None:
    with server(None) as address, pytest.raises(ValueError, match=r"nothing in 0\.05 s; leave"):
        check_answers(address, timeout_s=0.05)


def test_an_address_that_only_answers_like_ray_cannot_be_joined() -> None:
    with (
        server(SETTINGS) as address,
        pytest.raises(ValueError, match=f"'{address}' could not be j"),
    ):
        check_is_ray(address, timeout_s=3.0)


def test_an_address_without_a_listener_is_refused() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"no Ray cluster answers at '{address}'"):
            find_cluster(address)


def test_without_an_address_the_local_cluster_is_found(nowhere: Path) -> None:
    assert find_cluster(None) is None
    with pytest.raises(ValueError, match="address: no Ray cluster runs on this machine"):
        find_cluster("auto")
    for wanted in (None, "auto"):
        with server(SETTINGS) as address:
            nowhere.write_text(address)
            assert find_cluster(wanted) == address
    nowhere.write_text("127.0.0.1:1")
    assert find_cluster(None) is None, "a note of an ended cluster is ignored"


def test_a_cluster_named_by_the_environment_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ValueError, match="^RAY_ADDRESS: no Ray cluster answers at '127"):
        find_cluster(None)
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(ValueError, match="^RAY_ADDRESS: .*it is no host:port"):
        find_cluster(None)


def test_the_cluster_that_this_process_has_joined_is_used(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))  # type: ignore[arg-type]
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert find_cluster(None) is None
    with pytest.raises(ValueError, match="RAY_ADDRESS: no Ray cluster answers"):
        find_cluster("auto")
