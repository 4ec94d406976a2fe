"""Errors about models that are not found, here or on a hub, which is a server of this process."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from foretoken.api.build.drafts import find_draft
from foretoken.api.build.model_files import BUILTIN, find_model, other_models, ready_models
from foretoken.core.errors import ModelLoadError
from foretoken.core.model.families.registry import MODEL_FAMILIES, TEXT_FAMILIES
from foretoken.core.model.report import inspect_model

ANSWERS = {
    "/owner/gated/": (403, "GatedRepo"),
    "/owner/private/": (401, "RepoNotFound"),
    "/owner/busy/": (503, ""),
}


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = [answer for name, answer in ANSWERS.items() if name in self.path]
        status, code = found[0] if found else (404, "RepoNotFound")
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        yield
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("owner/missing", "the hub has no such model; for a private one set HF_TOKEN"),
        ("owner/private", "the hub has no such model; for a private one set HF_TOKEN"),
        ("owner/gated", "it is gated: accept its licence"),
        ("owner/busy", "503"),
        ("owner/a b", "Repo id must use alphanumeric chars"),
    ],
)
def test_a_model_that_the_hub_does_not_give_has_its_reason(name: str, told: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        find_model(name)
    message = str(caught.value)
    assert message.startswith(
        f"{name} is not a local folder and could not be downloaded from the hub: "
    )
    assert told in message
    assert "\n" not in message


def test_a_hub_that_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(ModelLoadError) as caught:
        find_model("owner/any")
    told = "from the hub: http://127.0.0.1:9 cannot be reached ([Errno 111] Connection refused)"
    assert str(caught.value).endswith(told)


def test_offline_the_cache_alone_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelLoadError, match="HF_HUB_OFFLINE is set and the model is not in the cache"
    ):
        find_model("owner/missing")


@pytest.mark.parametrize("is_offline", [True, False])
def test_a_model_of_the_cache_is_found_without_the_hub(
    is_offline: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    commit, folder = "a" * 40, tmp_path / "models--owner--kept"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    found = find_model("owner/kept")
    assert (found.path, found.name) == (snapshot, "owner/kept")


# -- names that are not of the hub --------------------------------------------------------------


def test_a_wrong_name_tells_how_to_list_models() -> None:
    with pytest.raises(ModelLoadError, match=r"a hub id of the form .* \(`foretoken list` shows"):
        find_model("smollm3")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither config\.json nor a GGUF file"):
        find_model(tmp_path)


def test_a_draft_that_is_not_found_tells_the_names_of_drafters() -> None:
    told = (
        "^draft: radics: not a folder, .* drafters by name: auto, radix, suffix, ngram, mtp, self$"
    )
    with pytest.raises(ModelLoadError, match=told):
        find_draft("radics")


def test_the_list_of_models_has_every_family_and_the_true_size_of_the_pair() -> None:
    out = "\n".join([*ready_models(), other_models()])
    sizes = [inspect_model(BUILTIN / name).num_parameters / 1e6 for name in ("target", "draft")]
    assert "{:.1f}M and {:.1f}M parameters".format(*sizes) in out
    listed = out.partition("Own decoder: ")[2].partition(".\n")[0].split(", ")
    assert listed == sorted(MODEL_FAMILIES | TEXT_FAMILIES)
