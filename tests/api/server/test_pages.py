"""The files of the pages over HTTP: media types, policy, caching, keys."""

from __future__ import annotations

import httpx
import pytest

from foretoken.api.server.routes.pages import FOLDER, MEDIA

FILES = [path.name for path in FOLDER.iterdir()]
PAGES = {"": "index.html", "docs": "docs.html"}
PATHS = [*PAGES, *(f"ui/{name}" for name in FILES if not name.endswith(".html"))]


@pytest.fixture
def url(serve):
    return serve(api_keys=("k",), admin_keys=("a",)).url


def test_every_file_has_a_known_media_type():
    assert {path.suffix for path in FOLDER.iterdir()} == MEDIA.keys()


@pytest.mark.parametrize("path", PATHS)
def test_files_need_no_key_and_have_the_policy(url, path):
    answer = httpx.get(f"{url}/{path}")
    assert answer.status_code == 200
    assert answer.content == (FOLDER / PAGES.get(path, path.removeprefix("ui/"))).read_bytes()
    media = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    suffix = PAGES.get(path, path).rpartition(".")[2]
    assert answer.headers["content-type"] == f"{media[suffix]}; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'"} <= {*policy}
    assert "unsafe" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["", "ui/chat.js"])
def test_a_browser_keeps_a_file_and_asks_whether_it_changed(url, path):
    first = httpx.get(f"{url}/{path}")
    assert first.headers["cache-control"] == "no-cache"
    again = httpx.get(f"{url}/{path}", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.get(f"{url}/{path}", headers={"if-none-match": "other"}).status_code == 200


def test_events_need_the_key_and_other_paths_are_not_there(url):
    assert httpx.get(f"{url}/ui/words.js").status_code == 200
    assert httpx.get(f"{url}/ui/events").status_code == 401
    assert httpx.get(f"{url}/ui/events", headers={"x-api-key": "k"}).status_code == 403
    for path in ("ui/none.js", "ui/%2e%2e/pages.py", "ui/..%2fpages.py", "ui/", "ui/a%00b"):
        assert httpx.get(f"{url}/{path}").status_code == 404, path
    assert httpx.post(f"{url}/ui/chat.js").status_code == 405


def test_without_pages_there_are_no_files(serve):
    url = serve(ui=False).url
    assert {httpx.get(f"{url}/{path}").status_code for path in PATHS} == {404}
