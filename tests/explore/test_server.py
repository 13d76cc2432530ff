"""The server answers its own page alone: this host, this token, these paths."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gape.explore.server import Explorer
from gape.explore.view import View

NEEDLE = Path(__file__).parents[2] / "src/gape/explore/needle/view.gz"


@pytest.fixture(scope="module")
def server() -> Iterator[Explorer]:
    server = Explorer(View.load(NEEDLE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def get(server: Explorer, path: str, host: str | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    answer.body = answer.read()
    return answer


def test_the_page_and_its_data_come_with_a_policy(server: Explorer) -> None:
    home = urlsplit(server.url).path
    page = get(server, home)
    assert page.status == 200
    assert b"<!DOCTYPE html>" in page.body
    assert page.headers["Content-Security-Policy"].startswith("default-src 'self'")
    assert "Access-Control-Allow-Origin" not in page.headers
    assert View.from_bytes(get(server, f"{home}view").body).header["tokens"] == 512
    assert get(server, f"{home}main.js").headers["Content-Type"].startswith("text/javascript")


def test_it_listens_on_this_machine_alone(server: Explorer) -> None:
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example:{port}"])
def test_another_host_is_refused_with_the_token_too(server: Explorer, host: str) -> None:
    answer = get(server, f"{urlsplit(server.url).path}view", host.format(port=server.server_port))
    assert answer.status == 421
    assert b"needle" not in answer.body


@pytest.mark.parametrize("path", ["/", "/view", "/wrong/view", "//view", "/%2e%2e/view"])
def test_a_missing_or_wrong_token_is_refused(server: Explorer, path: str) -> None:
    assert get(server, path).status == 403


@pytest.mark.parametrize("path", ["nothing", "../server.py", "%2e%2e/server.py", "tile?kind=gated", "row"])
def test_other_paths_are_not_there(server: Explorer, path: str) -> None:
    assert get(server, f"{urlsplit(server.url).path}{path}").status == 404


def test_a_target_that_is_no_address_is_refused(server: Explorer, capfd: pytest.CaptureFixture[str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest("GET", "http://[", skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    assert connection.getresponse().status == 400
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("data", [b"", b"\x04" + bytes(7) + b"1234", b"\x02" + bytes(7) + b"{}", b"\xff" * 40])
def test_bytes_that_are_no_view_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^view: "):
        View.from_bytes(data)


def test_a_port_that_is_taken_is_refused(server: Explorer) -> None:
    with pytest.raises(ValueError, match=r"^port: "):
        Explorer(View.load(NEEDLE), port=server.server_port)


def test_two_servers_have_different_tokens(server: Explorer) -> None:
    other = Explorer(View.load(NEEDLE))
    other.server_close()
    assert other.token != server.token
    assert len(other.token) >= 32


def test_the_command_shows_the_needle_without_torch_and_ends_on_a_signal() -> None:
    code = (
        "import sys, atexit; import gape.cli; sys.argv = ['gape', 'explore', '--no-browser']\n"
        "atexit.register(lambda: print('torch' in sys.modules, flush=True)); gape.cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    url = urlsplit(process.stdout.readline().strip())
    assert re.fullmatch(r"/[\w-]{32}/", url.path)
    connection = http.client.HTTPConnection(url.netloc, timeout=10)
    connection.request("GET", url.path)
    assert connection.getresponse().status == 200
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output = process.stdout.read()
    assert process.wait(timeout=20) == 130
    assert time.monotonic() - began < 10
    assert output.strip().endswith("False")


def test_the_needle_model_of_the_package_is_small() -> None:
    assert (NEEDLE.parent / "model.safetensors").stat().st_size < 10**6
