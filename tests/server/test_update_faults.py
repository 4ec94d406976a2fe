"""A server that is killed in the middle of an update: the next one serves the old weights."""

from __future__ import annotations

import base64
import http.client
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from foretoken.api.build.model_files import BUILTIN
from foretoken.api.build.updates.held_folder import PREFIX
from support.new_weights import FILE, digest, retrained
from support.plain_http import get, post
from support.server_process import Server, running

TARGET = BUILTIN / "target"
FLAGS = [
    "--kv-tokens", "4096", "--max-model-len", "512", "--threads", "1", "--allow-weight-updates",
]  # fmt: skip
BODY: dict[str, Any] = {"prompt": "def area(", "max_tokens": 24, "temperature": 1.5, "seed": 3}
PART_BYTES = 400_000
# The server ends itself as kill -9 does, when it has copied half of the tensors, or before the new
# weights are loaded.
KILLED = {
    "copy": """
from foretoken.api.build.updates import weight_exchange
copy = weight_exchange.copy_tensors
def half(pairs):
    copy(pairs[: len(pairs) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
weight_exchange.copy_tensors = half
""",
    "load": """
from foretoken.api.build.updates import checked_files
def check(found):
    os.kill(os.getpid(), signal.SIGKILL)
checked_files._check_values = check
""",
}
SERVE = (
    "import os, signal, sys\n{fault}\nfrom foretoken.api.cli.commands import main\nmain({words})"
)


def killed_in(where: str, model: Path) -> list[str]:
    """A command that starts a server which is killed in the middle of the update."""
    words = ["serve", str(model), "--port", "0", *FLAGS]
    return [sys.executable, "-c", SERVE.format(fault=KILLED[where], words=words)]


def answer(server: Server) -> Any:
    return post(server.url, "/v1/completions", BODY).json["choices"]


def send_parts(url: str, data: bytes) -> None:
    assert post(url, "/start_weight_update", {}).status == 200
    for start in range(0, len(data), PART_BYTES):
        part = base64.b64encode(data[start : start + PART_BYTES]).decode()
        assert post(url, "/update_weights", {"update_info": {"data": part}}).status == 200


@pytest.mark.parametrize("where", ["parts", "load", "copy"])
def test_after_kill_9_in_an_update_a_new_server_serves_the_old_weights(
    tmp_path: Path, where: str
) -> None:
    served, new = (
        retrained(TARGET, tmp_path / "served", seed=2),
        retrained(TARGET, tmp_path / "new"),
    )
    before, temporary = digest(served / FILE), tmp_path / "temporary"
    temporary.mkdir()
    variables = {"TMPDIR": str(temporary)}
    command = None if where == "parts" else killed_in(where, served)
    data = (new / FILE).read_bytes()
    with running(FLAGS, model=str(served), variables=variables, started_by=command) as server:
        expected = answer(server)
        send_parts(server.url, data[: len(data) // 2] if where == "parts" else data)
        if where == "parts":
            server.process.send_signal(signal.SIGKILL)
        else:
            with pytest.raises((http.client.HTTPException, OSError)):
                post(server.url, "/finish_weight_update", {"sha256": digest(new / FILE)})
        assert server.process.wait() == -signal.SIGKILL
    assert digest(served / FILE) == before
    assert [*temporary.glob(f"{PREFIX}*")], "the killed server could not remove its folders"
    with running(FLAGS, model=str(served), variables=variables) as server:
        assert [*temporary.glob(f"{PREFIX}*")] == []
        assert get(server.url, "/is_paused").json["weight_version"] == "0"
        assert answer(server) == expected
        send_parts(server.url, data)
        finished = post(server.url, "/finish_weight_update", {"sha256": digest(new / FILE)})
        assert finished.status == 200, finished.content
        assert answer(server) != expected
        send_parts(server.url, data[:PART_BYTES])
        assert server.stop() == 0
    assert [*temporary.glob(f"{PREFIX}*")] == [], "a server removes its folders when it ends"
