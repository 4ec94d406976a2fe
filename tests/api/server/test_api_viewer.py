"""GET /docs: a page that shows the API, loads nothing from elsewhere and works in a browser."""

from __future__ import annotations

import re
import shutil

import httpx
import pytest

from foretoken.api.server.routes.pages import FOLDER

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_it_needs_no_key_and_calls_by_relative_links(serve):
    answer = httpx.get(f"{serve(api_keys=('k',)).url}/docs")
    assert answer.status_code == 200, "the page itself needs no key"
    assert answer.text == (FOLDER / "docs.html").read_text("utf-8")
    script = (FOLDER / "docs.js").read_text("utf-8")
    assert not re.search(r"""(src|href)=["'](?!data:|openapi|ui/)""", answer.text)
    assert '"/openapi.json"' not in answer.text + script, "it would miss the path of a proxy"


def test_without_pages_it_is_not_there(serve):
    assert httpx.get(f"{serve(ui=False).url}/docs").status_code == 404


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.slow
def test_in_a_browser_it_shows_every_route_with_fields_and_an_example(serve):
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    url = serve(api_keys=("k",)).url
    described = httpx.get(f"{url}/openapi.json", headers={"x-api-key": "k"}).json()["paths"]
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if "Policy" in said.text else None)
        page.goto(f"{url}/docs")
        page.fill("#key", "k")
        page.click("#keys button")
        page.wait_for_selector(".route")
        paths = page.locator(".route .path").all_inner_texts()
        assert set(paths) == set(described)
        page.evaluate(
            "document.querySelectorAll('.route').forEach((each) => { each.open = true; })"
        )
        page.wait_for_function(
            "document.querySelectorAll('.route > div').length === "
            "document.querySelectorAll('.route').length"
        )
        chat = page.locator(".route", has_text="POST/v1/chat/completions").first.inner_text()
        assert f"curl {url}/v1/chat/completions" in chat
        assert '"messages":[{"role":"user"' in chat
        assert "cache_salt" in chat
        assert "401" in chat
        browser.close()
    assert errors == []
