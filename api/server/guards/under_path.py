"""``--root-path``: the application under a path of its proxy."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


class UnderPath:
    """Takes the path off the requests that have it, where the proxy leaves it on.

    All layers below see the paths of the routes, by which they decide what needs a key. With
    ``root_path`` of ASGI each of them would have to take it off.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. Links of the page are relative: without a slash they go wrong."""
        if scope["type"] == "http" and scope["path"] == self._root:
            location = {"location": f"{self._root}/"}
            await Response(status_code=308, headers=location)(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            scope["path"] = scope["path"].removeprefix(self._root)
        await self.app(scope, receive, send)
