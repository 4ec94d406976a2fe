"""A web page of another origin uses no server that has no keys, whatever its browser sends."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import pytest

from foretoken.api.server.guards.foreign_pages import is_loopback
from support.given import listening

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
OTHER = "http://127.0.0.1:8199"


def post(url: str, headers: Mapping[str, str], path: str = "/v1/chat/completions"):
    return httpx.post(url + path, json=BODY, headers=headers, timeout=20)


def own(url: str) -> str:
    return url.removeprefix("http://")


def code(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": OTHER},
        {"origin": "https://example.com"},
        {"origin": "null"},
        {"origin": "chrome-extension://abc"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/cache/flush"])
def test_a_page_of_another_origin_may_not_call(serve, engine, headers, path) -> None:
    server = serve(loopback_only=True)
    assert code(post(server.url, headers, path)) == (403, "foreign_origin")
    assert engine.requests == []


@pytest.mark.parametrize("path", ["/cache", "/v1/models", "/ui/events", "/metrics"])
def test_a_page_of_another_origin_may_not_even_ask(serve, path) -> None:
    answer = httpx.get(serve().url + path, headers={"sec-fetch-site": "cross-site"}, timeout=20)
    assert code(answer) == (403, "foreign_origin")


def test_the_servers_own_page_programs_and_typed_addresses_are_served(serve, say) -> None:
    server = serve(loopback_only=True)
    for headers in (
        {},
        {"origin": server.url, "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"host": "localhost:9000", "origin": "http://localhost:9000"},
    ):
        say("ok")
        assert post(server.url, headers).status_code == 200, headers


def test_a_link_on_another_site_opens_the_page_and_nothing_else(serve) -> None:
    server = serve(loopback_only=True)
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert httpx.get(server.url, headers=link).status_code == 200
    assert code(httpx.get(f"{server.url}/cache", headers=link)) == (403, "foreign_origin")
    framed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert code(httpx.get(server.url, headers=framed)) == (403, "foreign_origin")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "[x"]
)
def test_a_name_that_was_made_to_mean_this_machine_is_refused(serve, engine, host) -> None:
    """DNS rebinding: for the browser such a page and this server are one origin."""
    server = serve(loopback_only=True)
    answer = post(server.url, {"host": host, "origin": f"http://{host}"})
    assert code(answer) == (403, "foreign_host")
    assert "--allowed-host" in answer.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "127.0.0.1:80",
        "127.9.9.9",
        "[::1]:8000",
        "a.localhost",
        "host.docker.internal:8000",
    ],
)
def test_this_machines_own_names_are_served(serve, say, host) -> None:
    say("ok")
    assert post(serve(loopback_only=True).url, {"host": host}).status_code == 200


def test_names_and_origins_that_the_operator_allows_are_served(serve, say) -> None:
    server = serve(loopback_only=True, allowed_hosts=("Box:80",), cors_origins=("http://app",))
    for headers in (
        {"host": "box:80"},
        {"host": "BOX:1", "origin": "http://app"},
        {"host": "box", "origin": "http://box:8080", "sec-fetch-site": "same-origin"},  # a proxy's
    ):
        say("ok")
        assert post(server.url, headers).status_code == 200
    assert code(post(server.url, {"host": "box2"})) == (403, "foreign_host")
    assert code(post(server.url, {"origin": "http://app2"})) == (403, "foreign_origin")


def test_names_count_on_any_address_once_some_are_given(serve, say) -> None:
    say("ok")
    assert post(serve().url, {"host": "evil.example"}).status_code == 200
    server = serve(allowed_hosts=("box",))
    assert code(post(server.url, {"host": "evil.example"})) == (403, "foreign_host")


def test_any_name_and_any_origin_may_be_allowed(serve, say) -> None:
    server = serve(loopback_only=True, allowed_hosts=("*",), cors_origins=("*",))
    say("ok")
    headers = {"host": "x", "origin": OTHER, "sec-fetch-site": "cross-site"}
    assert post(server.url, headers).status_code == 200


def test_with_a_key_neither_host_nor_origin_matters(serve, say) -> None:
    say("ok")
    server = serve(loopback_only=True, api_keys=("k",))
    headers = {"host": "box", "origin": OTHER, "authorization": "Bearer k"}
    assert post(server.url, headers).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "text/json"])
def test_a_body_of_another_type_than_json_is_refused(serve, engine, kind) -> None:
    answer = post(serve().url, {"content-type": kind})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"]
)
def test_json_is_json_by_any_of_its_names(serve, say, kind) -> None:
    say("ok")
    assert post(serve().url, {"content-type": kind}).status_code == 200


@pytest.mark.parametrize("path", ["/cache", "/replicas", "/ui/events", "/debug/audit"])
def test_with_several_keys_and_no_admin_key_none_sees_what_others_do(serve, path) -> None:
    server = serve(api_keys=("a", "b"))
    method = "POST" if path.startswith("/debug") else "GET"
    answer = httpx.request(method, server.url + path, headers={"x-api-key": "a"}, timeout=20)
    assert code(answer) == (403, "admin_key_needed")
    assert httpx.request(method, server.url + path, timeout=20).status_code == 401


def test_loopback_is_found_by_the_address_that_it_listens_on() -> None:
    for flags, loopback_only in (
        ([], True),
        (["--host", "localhost"], True),
        (["--host", "::1"], True),
        (["--host", "0.0.0.0"], False),
        (["--host", "192.168.0.7"], False),
        (["--uds", "/tmp/x"], False),
    ):
        settings = listening(*flags, "--allowed-host", "box").settings
        assert (settings.loopback_only, settings.allowed_hosts) == (loopback_only, ("box",))


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),  # the old family's client of a socket for both
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("localhost", True),
        ("elsewhere", False),
    ],
)
def test_which_addresses_are_this_machine_s(host: str, is_local: bool) -> None:
    assert is_loopback(host) == is_local
