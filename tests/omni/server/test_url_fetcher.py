"""Files are fetched only from named hosts with public addresses, whole and of limited size."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import openai
import pytest

from omni.server.serving import url_fetcher
from omni.server.serving.api_error import ApiError
from omni.server.serving.settings import ServerLimits
from omni.server.serving.url_fetcher import UrlFetcher, is_public
from tests.support.gated_stage import gated_pipeline
from tests.support.http_call import connection, raw_post
from tests.support.live_server import LiveServer
from tests.support.patience import PATIENCE_S, wait_for


def drip(send: Callable[[bytes], Any]) -> None:
    """Send something regularly without an end."""
    with suppress(OSError):
        while True:
            send(b"x")
            time.sleep(0.01)  # faster, it would reach the size limit


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers depending on the path."""

    def do_GET(self) -> None:
        if self.path == "/dripping_head":
            drip(self.wfile.write)
            return
        where = {"/moved": 302, "/gone": 404}
        self.send_response(where.get(self.path, 200))
        if self.path == "/moved":
            self.send_header("Location", "/file")
        self.end_headers()
        if self.path == "/dripping":
            drip(self.wfile.write)
            return
        self.wfile.write(b"x" * 5000 if self.path == "/large" else self.headers["Host"].encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def all_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every address as public."""
    monkeypatch.setattr(url_fetcher, "is_public", lambda _: True)


def fetch(url: str, *hosts: str, room: int = 10_000) -> bytes:
    async def run() -> bytes:
        fetcher = UrlFetcher(hosts, ServerLimits(max_url_bytes=4096, url_timeout_s=30))
        try:
            return await fetcher.fetch(url, "url", room)
        finally:
            fetcher.close()

    return asyncio.run(run())


def refusal(url: str, *hosts: str) -> str:
    with pytest.raises(ApiError) as error:
        fetch(url, *hosts)
    assert error.value.status == 400 and error.value.param == "url"
    return error.value.message


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.9.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
        *("2002:a00:1::", "64:ff9b:1::1", "::ffff:169.254.169.254"),
    ],
)
def test_a_private_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch):
    assert not is_public(address)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert "not public" in refusal("http://named.example/a", "named.example")


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "2606:4700::1111"])
def test_a_public_address_is_accepted(address: str):
    assert is_public(address)


def test_a_host_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch):
    found = [(2, 1, 6, "", (address, 80)) for address in ("1.1.1.1", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert "10.0.0.1, which is not public" in refusal("http://named.example/a", "named.example")


@pytest.mark.parametrize(
    ("url", "reported"),
    [
        ("http://other.example/a", "nothing is fetched from 'other.example'"),
        ("http://named.example.evil.example/a", "nothing is fetched from"),
        ("http://named.example@evil.example/a", "nothing is fetched from 'evil.example'"),
        ("http://me:secret@named.example/a", "must not name a user"),
        ("http://named.example:99999/a", "it is no address"),
        ("http://[::1/a", "it is no address"),
        ("http://named.example/a b", "characters that an address cannot have"),
        ("http://named.example/\r\nX: y", "characters that an address cannot have"),
        ("http://127.0.0.1/a", "nothing is fetched from '127.0.0.1'"),
    ],
)
def test_a_url_that_is_not_allowed_is_refused(url: str, reported: str):
    assert reported in refusal(url, "named.example")


def test_a_named_host_is_contacted_at_the_address_that_was_checked(
    port: int, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []

    def check(address: str) -> bool:
        asked.append(address)
        return True

    monkeypatch.setattr(url_fetcher, "is_public", check)
    lookups: list[str] = []
    look_up = socket.getaddrinfo

    def note(host: str, *more: Any, **options: Any) -> Any:
        lookups.append(host)
        return look_up("127.0.0.1", *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", note)
    assert fetch(f"http://Named.example.:{port}/file", "named.example") == (
        f"named.example:{port}".encode()
    )
    assert asked == ["127.0.0.1"]
    assert "named.example" not in lookups[1:], "the name is looked up once"


@pytest.mark.parametrize(
    ("path", "reported"),
    [
        ("moved", "status 302; redirects are not followed"),
        ("gone", "status 404"),
        ("large", "larger than 4096 bytes"),
    ],
)
@pytest.mark.usefixtures("all_public")
def test_an_answer_without_the_file_is_refused(port: int, path: str, reported: str):
    assert reported in refusal(f"http://127.0.0.1:{port}/{path}", "127.0.0.1")


@pytest.mark.usefixtures("all_public")
def test_the_files_of_one_request_have_a_maximum_size(port: int):
    size = len(fetch(f"http://127.0.0.1:{port}/file", "127.0.0.1"))
    assert size == len(fetch(f"http://127.0.0.1:{port}/file", "127.0.0.1", room=size))
    with pytest.raises(ApiError, match="larger than its body may be"):
        fetch(f"http://127.0.0.1:{port}/file", "127.0.0.1", room=size - 1)


@pytest.fixture
def silent(all_public: None) -> Iterator[socket.socket]:
    """A host that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as host:
        host.settimeout(PATIENCE_S)
        yield host


def picture_of(host: socket.socket) -> list[Any]:
    url = {"url": f"http://127.0.0.1:{host.getsockname()[1]}/a.png"}
    return [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]


def test_silent_hosts_do_not_block_the_threads_of_the_server(silent: socket.socket):
    async def run() -> None:
        # The default number of threads grows with the number of cores.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        fetcher = UrlFetcher(["127.0.0.1"], ServerLimits(url_timeout_s=PATIENCE_S))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a"
        asked = [asyncio.create_task(fetcher.fetch(url, "url", 1)) for _ in range(50)]
        hosts = [await asyncio.to_thread(silent.accept) for _ in range(8)]
        await asyncio.to_thread(lambda: None)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for asked_for, _ in hosts:
            asked_for.close()
        fetcher.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.usefixtures("all_public")
@pytest.mark.parametrize("path", ["dripping", "dripping_head"])
def test_an_endless_answer_is_given_up(port: int, path: str):
    async def run() -> None:
        num_tasks = len(asyncio.all_tasks())
        fetcher = UrlFetcher(["127.0.0.1"], ServerLimits(max_url_bytes=1 << 30, url_timeout_s=0.1))
        for _ in range(2 * 8):  # twice the maximum number of simultaneous fetches
            with pytest.raises(ApiError, match="cannot be fetched"):
                await fetcher.fetch(f"http://127.0.0.1:{port}/{path}", "url", 1 << 30)
        assert len(asyncio.all_tasks()) == num_tasks

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_clients_may_leave_and_the_number_of_requests_that_wait_for_files_is_limited(
    silent: socket.socket,
):
    limits = {"url_timeout_s": PATIENCE_S, "max_waiting_requests": 0}
    with (
        LiveServer([gated_pipeline("few")], allow_url_hosts=["127.0.0.1"], **limits) as server,
        ThreadPoolExecutor() as pool,
    ):
        tasks = server.num_tasks()
        body = json.dumps({"model": "few", "messages": picture_of(silent)}).encode()
        with connection(server.url) as client:
            client.sendall(raw_post(body, path="/v1/chat/completions"))
            asked, _ = silent.accept()
        with asked:
            wait_for(lambda: server.num_tasks() <= tasks)
        first = pool.submit(
            server.client().chat.completions.create, model="few", messages=picture_of(silent)
        )
        asked, _ = silent.accept()
        with pytest.raises(openai.RateLimitError, match="wait for files") as error:
            server.client().chat.completions.create(model="few", messages=picture_of(silent))
        assert int(error.value.response.headers["retry-after"]) >= 1
        asked.close()
        with pytest.raises(openai.BadRequestError, match="cannot be fetched"):
            first.result()


def test_the_request_timeout_includes_the_time_of_fetching(silent: socket.socket):
    with (
        LiveServer(
            [gated_pipeline("late")], allow_url_hosts=["127.0.0.1"], request_timeout_s=0.2
        ) as server,
        pytest.raises(openai.APIStatusError, match="not done after 0.2 s") as error,
    ):
        server.client().chat.completions.create(model="late", messages=picture_of(silent))
    assert error.value.status_code == 504
