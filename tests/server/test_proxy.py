"""nginx, set up by docs/operations/nginx.conf, in front of real servers."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.server_process import free_port, running

pytestmark = pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed")
CONFIG = Path(__file__).parents[2] / "docs/operations/nginx.conf"
BODY = json.dumps({"prompt": "a", "max_tokens": 2, "temperature": 0})
FLAGS = ("--kv-tokens", "2048", "--max-model-len", "256", "--threads", "1", "--allowed-host", "*")


def configuration(folder: Path, port: int, upstreams: list[str]) -> Path:
    """Write a main configuration that includes the documented file with other ports."""
    servers = "\n".join(f"server {urlsplit(each).netloc};" for each in upstreams)
    text, count = re.subn(r"server 127\.0\.0\.1:8000;", servers, CONFIG.read_text())
    text, ports = re.subn(r"listen 8080;", f"listen 127.0.0.1:{port};", text)
    assert (count, ports) == (1, 1)
    (folder / "foretoken.conf").write_text(text)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "\n".join(f"{each}_temp_path {folder}/{each};" for each in kinds)
    main = folder / "nginx.conf"
    main.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off; {temporary} include {folder}/foretoken.conf; }}\n"
    )
    return main


@contextlib.contextmanager
def proxy(folder: Path, upstreams: list[str]) -> Iterator[int]:
    """Run nginx in front of servers; yields its port."""
    port = free_port()
    command = [
        "nginx",
        "-e",
        f"{folder}/error.log",
        "-c",
        str(configuration(folder, port, upstreams)),
    ]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until_it_listens(port, process)
        yield port
    finally:
        process.terminate()
        process.wait()


def until_it_listens(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with contextlib.suppress(ConnectionRefusedError), connected(port):
            return
    raise AssertionError(f"nginx ended with {process.returncode}")


def connected(port: int) -> contextlib.closing[HTTPConnection]:
    """Return a connection to the proxy that a ``with`` block closes."""
    client = HTTPConnection("127.0.0.1", port)
    client.connect()
    return contextlib.closing(client)


def status(client: HTTPConnection, method: str, path: str, body: str | None = None) -> int:
    client.request(method, path, body, {"Content-Type": "application/json"})
    with client.getresponse() as answer:
        answer.read()
        return answer.status


def test_clients_see_no_error_while_one_of_two_servers_is_stopped(tmp_path: Path) -> None:
    """Step 4 of an upgrade without downtime, docs/upgrade.md."""
    found: list[int] = []
    both_serve, is_stopped = threading.Barrier(5), threading.Event()

    def ask(port: int) -> None:
        with connected(port) as client:
            found.extend(status(client, "POST", "/v1/completions", BODY) for _ in range(10))
            both_serve.wait(60)
            while not is_stopped.is_set():
                found.append(status(client, "POST", "/v1/completions", BODY))
            found.extend(status(client, "POST", "/v1/completions", BODY) for _ in range(10))

    with running(FLAGS) as old, running(FLAGS) as new, proxy(tmp_path, [old.url, new.url]) as port:
        threads = [threading.Thread(target=ask, args=(port,)) for _ in range(4)]
        for each in threads:
            each.start()
        both_serve.wait(60)
        assert old.stop() == 0
        is_stopped.set()
        for each in threads:
            each.join()
    assert set(found) == {200}
    assert len(found) >= 80


@pytest.mark.parametrize("path", ["/metrics", "/ready", "/cache", "/debug/audit"])
def test_the_proxy_hides_the_routes_of_operators(path: str, tmp_path: Path) -> None:
    with proxy(tmp_path, ["http://127.0.0.1:1"]) as port, connected(port) as client:
        assert status(client, "GET", path) == 404
