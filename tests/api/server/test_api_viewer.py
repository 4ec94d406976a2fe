"""GET /docs: a page that shows the API, loads nothing from elsewhere and works in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil

import httpx
import pytest

from foretoken.api.server.routes.static_page import DOCS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_it_is_one_file_and_its_policy_permits_its_own_script_and_style_alone(serve):
    answer = httpx.get(f"{serve(api_keys=('k',)).url}/docs")
    assert answer.status_code == 200, "the page itself needs no key"
    assert answer.content == DOCS.read_bytes()
    assert not re.search(r"""(src|href)=["'](?!data:|openapi)""", answer.text)
    assert '"/openapi.json"' not in answer.text, "it would miss the path of a proxy"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


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
