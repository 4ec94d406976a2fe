"""Promises of docs/rollouts.md about the routes of trainers."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken import InvalidRequest
from foretoken.api.build.model_files import BUILTIN
from foretoken.api.cli.commands import main
from support.new_weights import FILE, digest, retrained
from support.plain_http import Answer, get, opened, post
from support.server_process import Server, running

TARGET = BUILTIN / "target"
FLAGS = ["--kv-tokens", "4096", "--max-model-len", "512", "--threads", "1"]
ALLOWED = [*FLAGS, "--allow-weight-updates"]
BODY: dict[str, Any] = {"prompt": "def area(", "max_tokens": 24, "temperature": 1.5, "seed": 3}
POSTS = (
    "/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update",
    "/reset_prefix_cache",
)  # fmt: skip
GETS = ("/is_paused", "/get_world_size")
PART_BYTES = 200_000


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return retrained(TARGET, tmp_path_factory.mktemp("weights") / "new")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(ALLOWED, model=str(TARGET)) as server:
        yield server


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    """The server with the weights of the start, running."""
    yield server.url
    post(server.url, "/resume", {})
    post(server.url, "/finish_weight_update", {})
    change(server.url, {"path": str(TARGET)})


def answer(url: str, **more: Any) -> dict[str, Any]:
    found = post(url, "/v1/completions", {**BODY, **more})
    assert found.status == 200, found.content
    return found.json


def change(url: str, info: dict[str, Any], **finish: Any) -> Answer:
    assert post(url, "/start_weight_update", {"is_checkpoint_format": True}).status == 200
    taken = post(url, "/update_weights", {"update_info": info})
    assert taken.status == 200, taken.content
    return post(url, "/finish_weight_update", finish)


def version(url: str) -> str:
    return get(url, "/is_paused").json["weight_version"]


def test_an_update_from_a_folder_changes_answers_and_their_version(url: str, new: Path) -> None:
    before = answer(url)
    assert before["weight_version"] == version(url)
    finished = change(
        url, {"path": str(new), "sha256": {FILE: digest(new / FILE)}}, weight_version="epoch-1"
    )
    assert (finished.status, finished.json) == (200, {"weight_version": "epoch-1"})
    after = answer(url, n=2)
    assert after["choices"][0]["text"] != before["choices"][0]["text"]
    assert after["weight_version"] == "epoch-1"
    spans = [{"start": 0, "version": "epoch-1"}]
    assert after["weight_versions"] == [{"index": index, "spans": spans} for index in (0, 1)]


def test_an_update_by_parts_equals_one_from_a_folder(url: str, new: Path) -> None:
    change(url, {"path": str(new)})
    expected = answer(url)["choices"]
    change(url, {"path": str(TARGET)})
    data = (new / FILE).read_bytes()
    assert post(url, "/start_weight_update", {}).status == 200
    for start in range(0, len(data), PART_BYTES):
        part = base64.b64encode(data[start : start + PART_BYTES]).decode()
        taken = post(url, "/update_weights", {"update_info": {"data": part, "offset": start}})
        assert taken.json == {"num_bytes": min(start + PART_BYTES, len(data))}
    finished = post(url, "/finish_weight_update", {"sha256": digest(new / FILE)})
    assert finished.status == 200, finished.content
    assert answer(url)["choices"] == expected


def test_calls_out_of_order_are_conflicts(url: str, new: Path) -> None:
    part = base64.b64encode(b"part").decode()
    info = {"update_info": {"data": part, "offset": 0}}
    assert post(url, "/update_weights", info).error["code"] == "update_conflict"
    assert post(url, "/finish_weight_update", {}).error["code"] == "update_conflict"
    assert post(url, "/start_weight_update", {}).status == 200
    assert post(url, "/start_weight_update", {}).error["code"] == "update_conflict"
    assert post(url, "/update_weights", info).status == 200
    assert post(url, "/update_weights", info).error["param"] == "update_info.offset"
    assert (
        post(url, "/update_weights", {"update_info": {"path": str(new)}}).error["code"]
        == "update_conflict"
    )
    both = {"update_info": {"data": part, "path": str(new)}}
    assert post(url, "/update_weights", both).error["param"] == "update_info"


@pytest.mark.parametrize(
    ("finish", "message"),
    [
        ({}, "sha256 of the bytes of all parts is required"),
        ({"sha256": "0" * 64}, "has the SHA-256"),
    ],
)
def test_refused_parts_end_the_update_and_change_nothing(
    url: str, new: Path, finish: dict[str, str], message: str
) -> None:
    before, former = answer(url), version(url)
    part = base64.b64encode((new / FILE).read_bytes()[:1000]).decode()
    refused = change(url, {"data": part}, **finish)
    assert refused.status == 400
    assert message in refused.error["message"]
    assert version(url) == former
    assert answer(url)["choices"] == before["choices"]


def test_a_refused_folder_names_the_tensors(url: str, tmp_path: Path) -> None:
    def lacking(tensors: dict[str, Any]) -> None:
        del tensors["model.norm.weight"]

    bad = retrained(TARGET, tmp_path / "bad", lacking)
    refused = change(url, {"path": str(bad)})
    assert refused.status == 400
    assert "lack tensors: model.norm.weight" in refused.error["message"]


@pytest.mark.parametrize(
    ("info", "param"),
    [
        ({"path": "p", "size": 1}, "update_info.size"),
        ({"shared_memory": "b", "size": 1, "sha256": {"b": "0" * 64}}, "update_info.sha256"),
        ({"data": "", "size": 4}, "update_info.size"),
        ({"path": "p", "offset": 3}, "update_info.offset"),
    ],
)
def test_a_field_of_another_source_is_refused(url: str, info: dict[str, Any], param: str) -> None:
    assert post(url, "/start_weight_update", {}).status == 200
    refused = post(url, "/update_weights", {"update_info": info})
    assert (refused.status, refused.error["param"]) == (400, param)


def test_a_digest_that_nothing_is_compared_with_and_an_unreadable_folder_are_refused(
    url: str, new: Path
) -> None:
    former = version(url)
    refused = change(url, {"path": str(new)}, sha256=digest(new / FILE))
    assert (refused.status, refused.error["param"]) == (400, "sha256")
    refused = change(url, {"path": "/" + 300 * "a"})
    assert refused.status == 400
    assert "cannot be read or staged" in refused.error["message"]
    assert version(url) == former


def test_a_stream_that_a_pause_keeps_goes_on_with_the_new_weights(url: str, new: Path) -> None:
    old = version(url)
    body = {"messages": [{"role": "user", "content": "a loop"}], "max_tokens": 300, "stream": True}
    with opened(url, "POST", "/v1/chat/completions", body | {"ignore_eos": True}) as response:
        lines = iter(response.readline, b"")
        next(line for line in lines if line.startswith(b"data: "))
        assert post(url, "/pause?mode=keep", {}).json == {"status": "paused"}
        assert get(url, "/is_paused").json == {"is_paused": True, "weight_version": old}
        change(url, {"path": str(new)}, weight_version="mixed")
        assert post(url, "/resume", {}).json == {"status": "resumed"}
        events = [line[6:] for line in lines if line.startswith(b"data: ")]
    assert events[-1].strip() == b"[DONE]"
    last = json.loads(events[-2])
    assert (last["choices"], last["weight_version"]) == ([], "mixed")
    (first, second) = last["weight_versions"][0]["spans"]
    assert first == {"start": 0, "version": old}
    assert second["version"] == "mixed"
    assert 0 < second["start"] < 300


def test_requests_wait_in_a_pause_and_abort_ends_running_ones(url: str) -> None:
    with ThreadPoolExecutor() as pool:
        body = {**BODY, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with opened(url, "POST", "/v1/completions", body) as response:
            lines = iter(response.readline, b"")
            next(line for line in lines if line.startswith(b"data: "))
            post(url, "/pause", {})
            rest = b"".join(lines)
        assert b'"stop_reason":"pause"' in rest
        later = pool.submit(answer, url)
        assert get(url, "/is_paused").json["is_paused"]
        post(url, "/resume", {})
        assert later.result()["choices"][0]["text"]
    assert post(url, "/pause?mode=stop", {}).error["param"] == "mode"


def test_rows_of_a_batch_that_a_pause_ended_run_again(url: str) -> None:
    bodies = [BODY | {"max_tokens": 150, "ignore_eos": True, "seed": number} for number in range(4)]
    expected = [answer(url, **body)["choices"][0]["text"] for body in bodies]
    rows = (
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    )
    data = "\n".join(map(json.dumps, rows)).encode()
    file = httpx.post(
        f"{url}/v1/files", data={"purpose": "batch"}, files={"file": ("b.jsonl", data)}
    ).json()
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batch = post(url, "/v1/batches", asked | {"input_file_id": file["id"]}).json
    while get(url, f"/v1/batches/{batch['id']}").json["status"] == "validating":
        time.sleep(0.01)  # as a client polls
    for _ in range(3):
        assert post(url, "/pause", {}).status == 200
        assert post(url, "/resume", {}).status == 200
    while (state := get(url, f"/v1/batches/{batch['id']}").json)["status"] != "completed":
        assert state["status"] in ("in_progress", "finalizing")
        time.sleep(0.01)
    found = httpx.get(f"{url}/v1/files/{state['output_file_id']}/content").text.splitlines()
    texts = {
        row["custom_id"]: row["response"]["body"]["choices"][0]["text"]
        for row in map(json.loads, found)
    }
    assert [texts[str(number)] for number in range(4)] == expected


def test_the_remaining_routes_of_trainers(url: str) -> None:
    assert get(url, "/get_world_size").json == {"world_size": 1}
    prompt = "def area(width, height):\n    return width * height\n" * 3
    answer(url, prompt=prompt)
    assert post(url, "/reset_prefix_cache", {}).json["flushed_pages"] > 0
    details = answer(url, prompt=prompt)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 0
    info = get(url, "/server_info?config_format=json").json
    assert info["settings"]["allow_weight_updates"] is True
    documented = get(url, "/openapi.json").json["paths"]
    assert set(POSTS + GETS) <= set(documented)


def test_without_the_flag_there_are_no_routes_and_no_versions() -> None:
    with running(FLAGS) as plain:
        assert {post(plain.url, path, {}).status for path in POSTS} == {404}
        assert {get(plain.url, path).status for path in GETS} == {404}
        assert "/pause" not in get(plain.url, "/openapi.json").json["paths"]
        assert not {"weight_version", "weight_versions"} & set(answer(plain.url))


def test_the_routes_need_the_admin_key() -> None:
    with running([*ALLOWED, "--api-key", "user", "--admin-key", "admin"]) as keyed:
        for path in POSTS:
            assert post(keyed.url, path, {}, {"authorization": "Bearer user"}).status == 403
            assert post(keyed.url, path, {}).status == 401
        for path in GETS:
            assert get(keyed.url, path, {"authorization": "Bearer user"}).status == 403
        assert get(keyed.url, "/is_paused", {"authorization": "Bearer admin"}).status == 200


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "builtin", *ALLOWED, "--receipts", "keys.pem"],
        ["replica", "builtin", *ALLOWED, "--front", "tcp://127.0.0.1:1"],
    ],
)
def test_the_flag_is_refused_where_it_would_not_hold(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = main(words)
    except (InvalidRequest, SystemExit) as error:
        status = error.code if isinstance(error, SystemExit) else 2
    assert status == 2
