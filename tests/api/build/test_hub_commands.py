"""pull, list, show, rm and revisions, against a hub that is a server of this process."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from foretoken.api.build import hub
from foretoken.api.build.model_files import BUILTIN, find_model
from foretoken.api.cli import commands
from foretoken.core.errors import InvalidRequest

TOKEN = "hf_secret"
OLD, NEW = "a" * 40, "b" * 40
REFS = {"main": NEW, "v1": OLD, OLD: OLD, NEW: NEW}
FILES = {
    "config.json": (BUILTIN / "target" / "config.json").read_bytes(),
    "model.safetensors": (BUILTIN / "target" / "model.safetensors").read_bytes(),
    "README.md": b"not wanted",
    "pytorch_model.bin": b"not wanted either",
}


def files(commit: str) -> dict[str, bytes]:
    return FILES if commit == NEW else FILES | {"generation_config.json": b'{"top_k": 3}'}


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": oid(data)}


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if "private" in self.path and self.headers["authorization"] != f"Bearer {TOKEN}":
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            commit = REFS.get(parts[-1])
            if commit is None:
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            if "tree" in parts:
                return self._json([entry(name, data) for name, data in files(commit).items()])
            siblings = [{"rfilename": name} for name in files(commit)]
            name = "/".join(parts[2:4])
            body = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
            return self._json(body)
        if len(parts) < 4:  # anything else that a version of the library may ask
            return self._send(404, b"", {})
        commit = REFS[parts[3]]
        data = files(commit)[parts[-1]]
        etag = f'"{oid(data)}"'
        return self._send(200, data, {"ETag": etag, "X-Repo-Commit": commit})

    do_HEAD = do_GET

    def _json(self, body: object) -> None:
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    Hub.asked.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield tmp_path
        server.shutdown()


def told(capsys, *args: str, code: int = 0) -> str:
    assert commands.main([*args]) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def test_a_model_is_pulled_listed_shown_and_removed(capsys, cache):
    folder = Path(told(capsys, "pull", "owner/tiny").strip())
    assert folder.name == NEW
    assert {each.name for each in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert "owner/tiny" in told(capsys, "list")
    shown = told(capsys, "show", "owner/tiny")
    assert f"revision  {NEW} (main)" in shown
    assert "own decoder" in shown
    assert "11 MiB freed" in told(capsys, "rm", "owner/tiny")
    assert "owner/tiny" not in told(capsys, "list")
    assert "foretoken pull owner/tiny" in told(capsys, "rm", "owner/tiny", code=2)
    assert "foretoken pull owner/tiny" in told(capsys, "show", "owner/tiny", code=2)


def test_a_revision_is_a_flag_or_part_of_the_name(capsys):
    first = told(capsys, "pull", "owner/tiny", "--revision", "v1")
    assert Path(first.strip()).name == OLD
    assert told(capsys, "pull", f"owner/tiny@{OLD}") == first
    told(capsys, "pull", "owner/tiny")
    found = find_model("owner/tiny@v1")
    assert (found.path.name, found.name, found.aliases) == (OLD, "owner/tiny", {"owner/tiny@v1"})
    assert find_model("owner/tiny").path.name == NEW
    assert "is not in the cache" in told(capsys, "rm", "owner/tiny@a", code=2)
    told(capsys, "rm", f"owner/tiny@{OLD[:8]}")
    assert [each.commit for each in hub.cached_models()] == [NEW]
    assert "the model has no such revision" in told(capsys, "pull", "owner/tiny@none", code=2)


def test_serve_and_all_others_take_a_revision(monkeypatch):
    asked = []

    def build(model, config):
        asked.append(model)
        raise InvalidRequest("enough", param="model")

    monkeypatch.setattr("foretoken.api.runtime.engine_client._build", build)
    monkeypatch.setattr("sys.stdin", None)
    for args in (["run", "owner/tiny", "x"], ["chat", "owner/tiny"]):
        assert commands.main([*args, "--revision", "v1"]) == 2
    assert asked == ["owner/tiny@v1"] * 2


@pytest.mark.parametrize("model", ["builtin", "./a/b", "owner/tiny@main"])
def test_a_revision_of_another_model_is_refused(model, capsys):
    error = told(capsys, "pull", model, "--revision", "v1", code=2)
    assert "revision needs a hub model OWNER/NAME" in error
    assert "is not a hub id" in told(capsys, "pull", "builtin", code=2)


def test_offline_nothing_is_asked_of_the_hub(capsys):
    error = told(capsys, "pull", "owner/tiny", "--offline", code=1)
    assert "the model is not in the cache" in error
    assert Hub.asked == []
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_token_opens_a_private_model(capsys, monkeypatch):
    assert "set HF_TOKEN" in told(capsys, "pull", "owner/private", code=2)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert NEW in told(capsys, "pull", "owner/private")


def test_a_local_model_is_shown_too(capsys):
    assert "own decoder" in told(capsys, "show", "builtin")


def test_the_former_names_say_which_are_theirs_now(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["models"]) == 0
    shown = capsys.readouterr()
    assert "`foretoken list`" in shown.err
    assert "Own decoder: " in shown.out
    assert commands.main(["models", "check", "builtin"]) == 0
    shown = capsys.readouterr()
    assert "`foretoken show MODEL`" in shown.err
    assert "parameters" in shown.out
