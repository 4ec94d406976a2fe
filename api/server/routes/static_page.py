"""Pages of one file each, without a build step, that load nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...serving.dialect import Endpoints, get
from ...serving.serving_context import Service
from ...serving.settings import Settings

FOLDER = Path(__file__).parent / "ui"
DOCS = FOLDER / "docs.html"
_WORDS = re.compile(rb'(<script type="application/json" id="words">).*?(</script>)', re.DOTALL)


class StaticPage:
    """A file with one inline script and one inline style, the only ones that may run in it."""

    def __init__(self, file: Path, words: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """``words``: tables that the page reads as JSON from its element ``words``."""
        self._file, self._words = file, words

    def answer(self) -> Response:
        """The page, with a policy that permits its own script and style by their hashes."""
        return Response(self._html, headers=self._headers)

    @cached_property
    def _html(self) -> bytes:
        html = self._file.read_bytes()
        if self._words is None:
            return html
        words = msgspec.json.encode(self._words).replace(b"<", b"\\u003c")  # no tag may begin
        return _WORDS.sub(lambda found: found[1] + words + found[2], html)

    @cached_property
    def _headers(self) -> dict[str, str]:
        policy = (
            f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
            f"form-action 'none'; frame-ancestors 'none'; script-src '{self._hash('script')}'; "
            f"style-src '{self._hash('style')}'"
        )
        return {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    def _hash(self, tag: str) -> str:
        """Hash of the page's one inline script or style, as a content security policy names it."""
        found = re.search(f"<{tag}>(.*?)</{tag}>".encode(), self._html, re.DOTALL)
        digest = hashlib.sha256(found[1] if found else b"").digest()
        return f"sha256-{base64.b64encode(digest).decode()}"


class ApiViewer(Endpoints):
    """GET /docs: a page that shows /openapi.json, for which it asks for the key if there is one."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._page = StaticPage(DOCS)

    @classmethod
    def is_served(cls, settings: Settings) -> bool:
        """Return False with ``--no-ui``."""
        return settings.ui

    @get("/docs", media="text/html")
    async def show(self, _request: Request) -> Response:
        """A page with all routes, their fields and an example of each."""
        return self._page.answer()
