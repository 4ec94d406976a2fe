"""A server as a process: the ready line, signals, draining, exit codes."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from foretoken import AsyncLLM, ModelLoadError
from foretoken.api.server.process import run
from foretoken.api.server.unix_socket import owned, remove
from foretoken.api.serving.settings import Listen
from support.forked import Talking, script

SECONDS = 30
SCRIPT = Path(__file__).parents[2] / "support" / "serve_fake.py"


class Process:
    """serve_fake.py, with its ready line read."""

    def __init__(self, built, drain=20.0, port=0, uds=()):
        eos = next(iter(built.eos_token_ids))
        args = [built.path, eos, built.vocab_size, port, drain, *uds]
        self.process = Talking(script, str(SCRIPT), *map(str, args))
        self.line = self.process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.line)
        self.url = found and found[0]
        self.answers = []

    def order(self, word):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def ask(self):
        """Send a request that needs one step; its answer is put into `answers`."""

        def post():
            body = {"prompt": [5], "max_tokens": 1}
            try:
                self.answers.append(
                    httpx.post(f"{self.url}/v1/completions", json=body, timeout=SECONDS)
                )
            except httpx.HTTPError as error:
                self.answers.append(error)

        self.asker = threading.Thread(target=post)
        self.asker.start()
        assert self.process.stdout.readline() == "submitted\n"

    def wait_for_ready(self, status):
        deadline = time.monotonic() + SECONDS
        while httpx.get(f"{self.url}/ready").status_code != status:
            assert time.monotonic() < deadline

    def end(self):
        code = self.process.wait(SECONDS)
        if self.answers or hasattr(self, "asker"):
            self.asker.join(SECONDS)
        return code


@pytest.fixture
def start(built):
    processes = []

    def launch(**options):
        processes.append(Process(built, **options))
        return processes[-1]

    yield launch
    for each in processes:
        each.process.close()


def test_an_idle_server_says_where_it_listens_and_leaves_on_sigterm_with_0(start):
    server = start()
    assert "tiny/model" in server.line
    assert httpx.get(f"{server.url}/ready").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0


def test_sigterm_lets_running_requests_finish_and_turns_away_new_ones(start):
    server = start()
    server.ask()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_ready(503)
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5]})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    server.order("step")
    assert server.end() == 0
    assert server.answers[0].json()["choices"][0]["finish_reason"] == "length"


def test_draining_is_bounded_and_every_request_gets_an_end(start):
    server = start(drain=0.1)
    server.ask()
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 0
    assert server.answers[0].status_code == 503


def test_the_second_signal_leaves_at_once(start):
    server = start()
    server.ask()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_ready(503)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 128 + signal.SIGTERM
    assert isinstance(server.answers[0], httpx.HTTPError)


def test_a_server_whose_engine_dies_does_not_linger(start):
    server = start()
    server.ask()
    server.order("die")
    assert server.end() == 1
    assert server.answers[0].status_code == 503


def test_a_port_that_is_taken_is_an_error_and_not_a_traceback(start):
    first = start()
    second = start(port=first.url.rpartition(":")[2])
    assert second.end() == 1
    port = first.url.rpartition(":")[2]
    assert f"port {port} is in use by another program; choose another with --port" in second.line
    assert "Traceback" not in second.process.stderr.read()


def test_a_port_that_another_took_while_the_model_was_loading_is_one_line(
    built, monkeypatch, caplog
):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # both may bind it so
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]

        async def start(self):
            other.listen()

        monkeypatch.setattr(AsyncLLM, "start", start)
        assert run(AsyncLLM.from_built(built), Listen(port=port)) == 1
    assert f"port {port} is in use by another program" in caplog.text


# -- a Unix socket ------------------------------------------------------------------------------


def get_version(path):
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=SECONDS) as http:
        return http.get("http://x/version").status_code


def test_a_unix_socket_is_its_owners_alone_and_goes_with_the_server(start, tmp_path):
    path = tmp_path / "s"
    for _ in range(2):
        server = start(uds=[path])
        assert f"unix:{path}" in server.line
        assert path.stat().st_mode & 0o777 == 0o600
        assert get_version(path) == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert not path.exists()


def test_the_socket_that_a_killed_server_left_is_in_nobodys_way(start, tmp_path):
    path = tmp_path / "s"
    killed = start(uds=[path])
    killed.process.kill()
    killed.end()
    assert path.is_socket()
    start(uds=[path])
    assert get_version(path) == 200


def test_a_socket_that_is_served_and_a_file_that_is_none_are_left_alone(start, tmp_path):
    path, file = tmp_path / "s", tmp_path / "f"
    start(uds=[path])
    file.write_text("mine")
    for taken in (path, file):
        second = start(uds=[taken])
        assert second.end() == 1
        assert f"{taken} is used by another server" in second.line
    assert get_version(path) == 200
    assert file.read_text() == "mine"


def test_a_socket_of_a_server_that_still_loads_is_left_alone(tmp_path):
    path = tmp_path / "s"
    with owned(path), socket.socket(socket.AF_UNIX) as loading:
        loading.bind(str(path))
        with pytest.raises(OSError, match="in use"), owned(path):
            pass
        assert path.is_socket()
    with owned(path):  # the first one is over: what it left is stale
        assert not path.exists()
    assert list(tmp_path.iterdir()) == []


def test_only_the_own_socket_is_removed(tmp_path):
    path, moved = tmp_path / "s", tmp_path / "old"
    path.write_text("ours")
    ours = path.stat()
    path.rename(moved)
    path.write_text("another's")
    remove(path, ours)
    assert path.exists()
    remove(moved, ours)
    assert not moved.exists()


def test_a_model_that_does_not_load_leaves_no_socket(built, monkeypatch, tmp_path):
    async def fail(self):
        raise ModelLoadError("no weights")

    monkeypatch.setattr(AsyncLLM, "start", fail)
    with pytest.raises(ModelLoadError):
        run(AsyncLLM.from_built(built), Listen(uds=str(tmp_path / "s")))
    assert not list(tmp_path.iterdir())
