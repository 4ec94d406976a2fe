"""``--root-path``: a server under a path of its proxy, which takes the path off or leaves it on."""

from __future__ import annotations

import re

import httpx
import pytest

from foretoken.api.server.routes.pages import FOLDER

TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ROOT = "/llm"


@pytest.fixture
def http(serve):
    server = serve(root_path=ROOT, api_keys=("k",), admin_keys=("admin",))
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("root", ["", ROOT])
def test_routes_are_found_with_the_path_and_without_it(http, root) -> None:
    answer = http.post(f"{root}/v1/chat/completions", json=TALK, headers={"x-api-key": "k"})
    assert answer.status_code == 200
    assert http.get(f"{root}/v1/nothing", headers={"x-api-key": "k"}).status_code == 404


@pytest.mark.parametrize("root", ["", ROOT])
def test_keys_are_needed_for_the_same_routes(http, root) -> None:
    assert http.get(f"{root}/health").status_code == 200
    assert http.get(f"{root}/v1/models").status_code == 401
    for method, path in (("POST", "/debug/audit"), ("GET", "/cache"), ("GET", "/ui/events")):
        answer = http.request(method, f"{root}{path}", headers={"x-api-key": "k"})
        assert answer.status_code == 403, path
    answer = http.post(f"{root}/v1/messages", json=TALK)
    assert answer.json()["type"] == "error", "the body of an error is that of the route's API"


@pytest.mark.parametrize("path", ["/llmx/health", f"{ROOT}{ROOT}/health", f"{ROOT}health"])
def test_other_paths_are_none_of_its_own(http, path) -> None:
    assert http.get(path).status_code == 401
    assert http.get(path, headers={"x-api-key": "k"}).status_code == 404


def test_the_page_has_a_slash_behind_the_path_and_calls_by_relative_links(http) -> None:
    moved = http.get(ROOT, headers={"host": "evil"})
    assert (moved.status_code, moved.headers["location"]) == (308, f"{ROOT}/")
    page = http.get(f"{ROOT}/")
    assert page.status_code == 200
    texts = [page.text]
    for name in re.findall(r'(?:href|src)="(ui/[^"]*)', page.text):
        texts.append(http.get(f"{ROOT}/{name}").raise_for_status().text)
    for script in FOLDER.glob("*.js"):
        texts.append(http.get(f"{ROOT}/ui/{script.name}").raise_for_status().text)
    called = r"""(?:fetch|ask|import)\(\s*["'`]([^"'`]*)|(?:href|src)="([^"]*)|from "([^"]*)"""
    calls = [each for text in texts for call in re.findall(called, text) for each in call if each]
    assert {"ui/events", "v1/models", "./words.js", "./answer.js"} <= {*calls}
    assert [each for each in calls if each.startswith("/")] == []


def test_a_link_to_the_page_is_followed_from_anywhere(serve) -> None:
    url = serve(root_path=ROOT, loopback_only=True).url
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert httpx.get(f"{url}{ROOT}/", headers=headers).status_code == 200
    assert httpx.get(f"{url}{ROOT}/v1/models", headers=headers).status_code == 403


def test_openapi_names_the_path(http, serve) -> None:
    document = http.get(f"{ROOT}/openapi.json", headers={"x-api-key": "k"}).json()
    assert document["servers"] == [{"url": ROOT}]
    assert "servers" not in httpx.get(f"{serve().url}/openapi.json").json()
