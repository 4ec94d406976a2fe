"""Receipts of a server's answers: what they state, and which of them are refused."""

from __future__ import annotations

import json
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from foretoken.api.cli.commands import main
from foretoken.api.receipts.keys import SigningKeys
from foretoken.api.receipts.receipt import hash_of
from foretoken.core.errors import InvalidRequest
from support.plain_http import get, post
from support.server_process import running

FLAGS = ["--kv-tokens", "4096", "--max-model-len", "256", "--threads", "1"]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a loop"}], "max_tokens": 20, "n": 2},
    TEXT: {"prompt": ["def a():", "def b():"], "max_tokens": 20, "n": 2, "temperature": 1.5},
}
paths = pytest.mark.parametrize("path", [CHAT, TEXT])


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "receipts.pem"


@pytest.fixture(scope="module", params=["engine", "front"])
def url(request: pytest.FixtureRequest, key_file: Path) -> Iterator[str]:
    flags = [*FLAGS, "--receipts", str(key_file)]
    with running(flags, is_front=request.param == "front") as server:
        yield server.url


def recorded(url: str, path: str, **more: Any) -> dict[str, Any]:
    """A request without a seed and its response."""
    body = {**BODIES[path], "return_token_ids": True, **more}
    answer = post(url, path, body)
    assert answer.status == 200, answer.content
    return {"request": body, "response": answer.json}


def verify(
    tmp_path: Path, url: str, record: object, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """The exit status, stdout and stderr of ``foretoken verify --receipt``."""
    file, keys = tmp_path / "recorded.json", tmp_path / "keys.json"
    file.write_text(json.dumps(record))
    keys.write_bytes(get(url, "/v1/receipts/key").content)
    status = main(["verify", str(file), "builtin", "--receipt", str(keys), *FLAGS])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@paths
def test_each_choice_has_a_receipt_of_its_tokens(url: str, path: str) -> None:
    found = recorded(url, path)["response"]
    assert [each["index"] for each in found["receipts"]] == [
        each["index"] for each in found["choices"]
    ]
    keys = get(url, "/v1/receipts/key").json
    seeds = set()
    for choice, receipt in zip(found["choices"], found["receipts"], strict=True):
        stated = json.loads(receipt["payload"])
        assert receipt["key_id"] == keys["key_id"]
        assert stated["id"] == found["id"]
        assert stated["answer_sha256"] == hash_of(choice["token_ids"])
        assert stated["num_tokens"] == len(choice["token_ids"])
        assert stated["finish_reason"] == choice["finish_reason"]
        assert stated["sampling"]["max_tokens"] == 20
        assert stated["kernels"]
        assert len(stated["model_digest"]) == 64
        seeds.add(stated["seed"])
    assert len(seeds) >= 2


@paths
@pytest.mark.parametrize("with_usage", [True, False])
def test_the_last_event_of_a_stream_has_the_receipts(url: str, path: str, with_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    answer = post(url, path, {**BODIES[path], "stream": True, "seed": 3, **options})
    lines = [each for each in answer.content.decode().split("\n\n") if each]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(each.removeprefix("data: ")) for each in lines[:-1]]
    assert not any("receipts" in each for each in events[:-1])
    stated = [json.loads(each["payload"]) for each in events[-1]["receipts"]]
    whole = recorded(url, path, seed=3)["response"]
    hashes = [hash_of(each["token_ids"]) for each in whole["choices"]]
    assert [each["answer_sha256"] for each in stated] == hashes
    assert (events[-1].get("usage") is not None) is with_usage


def test_openais_client_reads_receipts(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        found = client.chat.completions.create(
            model="foretoken-builtin", messages=[{"role": "user", "content": "hi"}], max_tokens=5
        )
    assert found.model_extra is not None
    assert len(found.model_extra["receipts"]) == 1


@paths
def test_answers_are_verified_with_the_seed_of_their_receipt(
    url: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = recorded(url, path)
    status, shown, _ = verify(tmp_path, url, record, capsys)
    assert status == 0, shown
    assert shown.count("verified, ") == len(record["response"]["choices"])


def alter(record: dict[str, Any], what: str) -> None:
    response = record["response"]
    choice, receipt = response["choices"][0], response["receipts"][0]
    if what == "token":
        choice["token_ids"][3] += 1
    elif what == "finish":
        choice["finish_reason"] = "tool_calls"
    elif what == "payload":
        receipt["payload"] = receipt["payload"].replace('"num_tokens":20', '"num_tokens":21')
    elif what == "signature":
        receipt["signature"] = response["receipts"][1]["signature"]
    elif what == "key":
        receipt["key_id"] = "0" * 16
    elif what == "id":
        response["id"] = "chatcmpl-other"
    elif what == "none":
        del response["receipts"]
    else:
        del choice["token_ids"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("token", "of another answer"),
        ("finish", "its answer ended with"),
        ("payload", "it was altered"),
        ("signature", "it was altered"),
        ("key", "not among the given keys"),
        ("id", "it is of the response"),
        ("none", "no list of receipts"),
        ("text", "record it with return_token_ids"),
    ],
)
def test_altered_receipts_are_refused(
    url: str, what: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = recorded(url, CHAT, ignore_eos=True)
    alter(record, what)
    status, shown, error = verify(tmp_path, url, record, capsys)
    assert (status, shown) == (2, "")
    assert "record 1, choice 0" in error
    assert said in error


def test_a_server_without_receipts_has_no_route_and_no_field() -> None:
    with running(FLAGS) as server:
        assert get(server.url, "/v1/receipts/key").status == 404
        assert "receipts" not in recorded(server.url, CHAT)["response"]


def test_a_key_file_is_private_and_later_keys_sign(tmp_path: Path) -> None:
    file, newer = tmp_path / "one.pem", tmp_path / "two.pem"
    first, second = SigningKeys.load(file), SigningKeys.load(newer)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {each.suffix for each in tmp_path.iterdir()} == {".pem"}
    assert SigningKeys.load(file).public == first.public
    with file.open("ab") as opened:
        opened.write(newer.read_bytes())
    both = SigningKeys.load(file).public
    assert both.key_id == second.public.key_id
    assert [each.key_id for each in both.keys] == [first.public.key_id, second.public.key_id]


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"", 0o600, "no Ed25519 private key"),
        (b"-----BEGIN PRIVATE KEY-----\nxx\n-----END PRIVATE KEY-----\n", 0o600, "damaged"),
        (b"", 0o644, "chmod 600"),
    ],
)
def test_bad_key_files_are_refused(tmp_path: Path, content: bytes, mode: int, said: str) -> None:
    file = tmp_path / "keys.pem"
    file.write_bytes(content)
    file.chmod(mode)
    with pytest.raises(InvalidRequest, match=said):
        SigningKeys.load(file)


def test_a_key_of_openssl_works(tmp_path: Path) -> None:
    file = tmp_path / "keys.pem"
    made = subprocess.run(
        ["openssl", "genpkey", "-algorithm", "ed25519"], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("openssl cannot make the key")
    file.write_bytes(made.stdout)
    file.chmod(0o600)
    assert len(SigningKeys.load(file).public.keys) == 1
