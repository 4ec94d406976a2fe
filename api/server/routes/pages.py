"""GET / and GET /docs: static pages without a build step; GET /ui/...: their files.

The pages need no key: they ask the user for one, store it in the browser and send it. They load
nothing from other servers, and their policy forbids inline scripts and styles.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from ....core.telemetry.metrics import PARTS
from ....draft.sources.names import DRAFTERS
from ...runtime.cache_diagnostics import LOSSES
from ...serving.dialect import Endpoints, get
from ...serving.serving_context import Service
from ...serving.settings import Settings

HTML = "text/html"
FOLDER = Path(__file__).parent / "ui"
PREFIX = "/ui"
# mimetypes depends on the system, and with nosniff browsers reject other types.
MEDIA = {".html": HTML, ".css": "text/css", ".js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # browsers revalidate, so that the versions of modules match
}


class PageFiles(StaticFiles):
    """The files of the pages, with media types and the content security policy."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        """Return a file, or 304 if the browser has it already."""
        answer = super().file_response(full_path, stat_result, scope, status_code)
        answer.headers.update(HEADERS)
        if answer.status_code == status_code:
            media = MEDIA[Path(full_path).suffix]
            answer.headers["content-type"] = f"{media}; charset=utf-8"
        return answer


class PagePartFiles(PageFiles):
    """The files without the HTML pages, whose relative links work only at their own routes."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        """Return the path and the stat result of a file; ``("", None)`` if it is not served."""
        return super().lookup_path(path) if Path(path).suffix != ".html" else ("", None)


class Pages(Endpoints):
    """The live page, the API viewer, and the display names that the live page uses."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._files = PageFiles()

    @classmethod
    def is_served(cls, settings: Settings) -> bool:
        """Whether the pages are served; not with ``--no-ui``."""
        return settings.ui

    @property
    def routes(self) -> list[BaseRoute]:
        """The routes, and the files below `PREFIX`."""
        return [*super().routes, Mount(PREFIX, PagePartFiles())]

    @get("/", media=HTML)
    async def show(self, request: Request) -> Response:
        """Return the live page."""
        return await self._files.get_response("index.html", request.scope)

    @get("/docs", media=HTML)
    async def show_api(self, request: Request) -> Response:
        """Return a page with all routes, their fields and examples."""
        return await self._files.get_response("docs.html", request.scope)

    @get(f"{PREFIX}/words.js", media=MEDIA[".js"])
    async def words(self, _request: Request) -> Response:
        """Return a module with display names of sources, causes of misses and parts of a step."""
        words = {"drafters": DRAFTERS, "losses": LOSSES, "parts": PARTS}
        module = b"export const words = %s;\n" % msgspec.json.encode(words)
        return Response(module, media_type=MEDIA[".js"], headers=HEADERS)
