"""Adapters over HTTP: names in every route, loading and unloading, and what is refused."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from foretoken.api.build.built import Built
from foretoken.api.build.engine_builder import build
from foretoken.core.config import EngineConfig
from foretoken.core.engine.engine import Engine
from support.lora_models import AdaptedModel

PROMPT = "which animals sleep in winter?"
ADMIN = {"authorization": "Bearer admin"}
KEY = {"authorization": "Bearer key"}
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    torch.set_num_threads(1)
    return AdaptedModel(tmp_path_factory.mktemp("adapted"))


@pytest.fixture
def built(adapted: AdaptedModel) -> Built[Engine]:
    """The engine of the fixture `serve`."""
    return build(adapted.base, EngineConfig(draft="radix", threads=1, kv_tokens=4096, page_size=4))


@pytest.fixture
def client(serve: Callable[..., Any], adapted: AdaptedModel) -> Iterator[httpx.Client]:
    server = serve(
        admin_keys=("admin",),
        api_keys=("key",),
        served_names=("base",),
        lora_dir=str(adapted.folder),
    )
    with httpx.Client(base_url=server.url, timeout=30, headers=KEY) as client:
        yield client


def load(client: httpx.Client, name: str, path: str) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path}
    return client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


def complete(client: httpx.Client, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "return_token_ids": True, **GREEDY, **more}
    return client.post("/v1/completions", json=body)


def wanted(adapted: AdaptedModel, name: str | None) -> list[int]:
    return adapted.answer(name, adapted.tokenizer(PROMPT).input_ids, 8)


def test_every_route_takes_the_name_of_an_adapter(
    client: httpx.Client, adapted: AdaptedModel
) -> None:
    for name in ("sql", "legal"):
        loaded = load(client, name, name)
        assert loaded.status_code == 200, loaded.text
    assert loaded.json()["rank"] == 8
    assert loaded.json()["num_bytes"] > 0
    for name, model in (("sql", "sql"), ("legal", "legal"), (None, "base")):
        answer = complete(client, model).json()
        assert answer["choices"][0]["token_ids"] == wanted(adapted, name)
        assert answer["model"] == model
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "hi", "max_output_tokens": 4, "temperature": 0},
        "/v1/embeddings": {"input": "hi"},
        "/v1/rerank": {"query": "hi", "documents": ["a"]},
    }
    for path, body in bodies.items():
        own, base = (client.post(path, json={**body, "model": model}) for model in ("sql", "base"))
        assert own.status_code == base.status_code == 200, (path, own.text)
        assert (own.json()["model"], base.json()["model"]) == ("sql", "base"), path
    assert client.post("/tokenize", json={"model": "sql", "prompt": "hi"}).status_code == 200
    streamed = complete(client, "sql", stream=True).text
    assert '"model":"sql"' in streamed


def test_models_are_listed_with_their_parent(client: httpx.Client) -> None:
    assert load(client, "sql", "sql").status_code == 200
    listed = client.get("/v1/models").json()
    assert [(each["id"], each["parent"]) for each in listed["data"]] == [
        ("base", None),
        ("sql", "base"),
    ]
    assert listed["last_id"] == "sql"
    assert client.get("/v1/models/sql").json()["parent"] == "base"
    metrics = client.get("/metrics").text
    assert "foretoken:lora_loaded 1.0" in metrics
    assert 'foretoken:lora_requests_total{adapter="sql"} 0.0' in metrics
    complete(client, "sql")
    assert 'lora_requests_total{adapter="sql"} 1.0' in client.get("/metrics").text
    assert unload(client, "sql").status_code == 200
    refused = complete(client, "sql")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert "foretoken:lora_loaded 0.0" in client.get("/metrics").text
    gone = unload(client, "sql")
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "lora_name")


def test_an_unload_waits_for_a_stream(client: httpx.Client, adapted: AdaptedModel) -> None:
    load(client, "sql", "sql")
    done = threading.Event()
    answers: list[httpx.Response] = []

    def take_away() -> None:
        answers.append(unload(client, "sql"))
        done.set()

    body = {"model": "sql", "prompt": PROMPT, "stream": True, **GREEDY, "max_tokens": 200}
    thread = threading.Thread(target=take_away)
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        thread.start()
        while complete(client, "sql").status_code != 404:
            pass
        assert not done.is_set()
        ids = [line for line in lines if line]
    thread.join(30)
    assert answers[0].status_code == 200
    assert ids[-1] == "data: [DONE]"


def test_a_reload_under_a_name_serves_new_requests_and_running_ones_keep_the_old_adapter(
    client: httpx.Client, adapted: AdaptedModel
) -> None:
    load(client, "policy", "sql")
    old = complete(client, "policy", max_tokens=100).json()["choices"][0]["token_ids"]
    refused = client.post(
        "/v1/load_lora_adapter",
        json={"lora_name": "policy", "lora_path": "legal", "load_inplace": False},
        headers=ADMIN,
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    body = {"model": "policy", "prompt": PROMPT, "return_token_ids": True, "stream": True, **GREEDY}
    with client.stream("POST", "/v1/completions", json={**body, "max_tokens": 100}) as stream:
        lines = (line[6:] for line in stream.iter_lines() if line.startswith("data: "))
        running = [next(lines)]
        replaced = client.post(
            "/v1/load_lora_adapter",
            json={"lora_name": "policy", "lora_path": "legal", "load_inplace": True},
            headers=ADMIN,
        )
        assert replaced.status_code == 200, replaced.text
        running += lines
    chunks = [json.loads(each) for each in running[:-1]]
    found = [token for each in chunks for token in each["choices"][0]["token_ids"]]
    assert found == old
    new = complete(client, "policy").json()
    assert new["choices"][0]["token_ids"] == wanted(adapted, "legal") != wanted(adapted, "sql")
    assert new["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_flush_of_a_salt_drops_what_its_adapters_computed(client: httpx.Client) -> None:
    load(client, "sql", "sql")
    for flushed in (0, 1):
        first, second = (complete(client, "sql", cache_salt="s").json() for _ in range(2))
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        if not flushed:
            dropped = client.post("/cache/flush", json={"cache_salt": "s"}).json()
            assert dropped["flushed_pages"] > 0


def test_the_cache_takes_no_salt_that_is_of_an_adapter(client: httpx.Client) -> None:
    salt = '\0lora["sql", 1, ""]'
    for refused in (
        client.get("/cache", params={"cache_salt": salt}, headers=ADMIN),
        client.post("/cache/flush", json={"cache_salt": salt}),
        client.post("/cache/flush", json={"cache_salt": salt, "prefix": "hi"}),
    ):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


def test_a_miss_is_explained_to_the_caller_with_the_salt(client: httpx.Client) -> None:
    load(client, "sql", "sql")
    answer = complete(client, "sql", cache_salt="s").json()
    asked = {"response_id": answer["id"], "cache_salt": "s"}
    assert client.get("/cache/explain", params=asked).status_code == 200
    assert client.get("/cache/explain", params={"response_id": answer["id"]}).status_code == 404


def test_without_an_admin_key_there_are_no_such_routes(serve: Callable[..., Any]) -> None:
    url = serve().url
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert httpx.post(url + path, json={"lora_name": "a"}).status_code == 404
        assert path not in httpx.get(url + "/openapi.json").json()["paths"]


def test_other_keys_change_no_adapter(client: httpx.Client) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        refused = client.post(path, json={"lora_name": "a", "lora_path": "sql"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_needed")


def test_paths_outside_of_the_folder_are_forbidden(
    client: httpx.Client, adapted: AdaptedModel, tmp_path: Path
) -> None:
    outside = Path(adapted.write("sql", "../outside" + tmp_path.name)).resolve()
    (adapted.folder / "link").symlink_to(outside)
    inner = adapted.folder / "linked-file"
    inner.mkdir()
    for name in os.listdir(outside):
        (inner / name).symlink_to(outside / name)
    for path in (
        str(outside), "../" + outside.name, "sql/../../" + outside.name, "sql/../sql", "link",
        "a" * 256, "a/" * 2045 + "a",
        "link/", "linked-file", ".", str(adapted.folder), "/etc", "sql\0",
    ):  # fmt: skip
        refused = load(client, "x", path)
        assert refused.status_code == 403, path
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == ("lora_path", "path_forbidden")
    assert load(client, "x", str(adapted.folder / "sql")).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "base", "lora_path": "sql"}, "lora_name"),
        ({"lora_name": "a b", "lora_path": "sql"}, "lora_name"),
        ({"lora_name": "", "lora_path": "sql"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "nowhere"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "base"}, "lora_path"),
        ({"lora_name": "a", "lora_path": 3}, "lora_path"),
    ],
)
def test_bad_bodies_name_the_field(client: httpx.Client, body: Any, param: str) -> None:
    refused = client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_more_adapters_than_allowed_are_refused(
    client: httpx.Client, adapted: AdaptedModel
) -> None:
    for number in range(8):
        assert load(client, f"a{number}", "sql").status_code == 200
    refused = load(client, "a8", "sql")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    assert load(client, "a3", "legal").status_code == 200  # in the place of another
    assert unload(client, "a3").status_code == 200
    assert load(client, "a8", "sql").status_code == 200


def test_settings_show_no_paths(client: httpx.Client, adapted: AdaptedModel) -> None:
    assert str(adapted.folder) not in json.dumps(client.get("/server_info").json())
