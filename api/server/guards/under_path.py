"""``--root-path``: the path under which a reverse proxy serves the application."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


class UnderPath:
    """Removes the root path from requests if the proxy has not done so.

    All inner layers see the paths of the routes, from which they decide whether a key is required.
    With ASGI's ``root_path`` each layer would have to remove it.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. The root path without a slash is redirected, since links are
        relative.
        """
        if scope["type"] == "http" and scope["path"] == self._root:
            location = {"location": f"{self._root}/"}
            await Response(status_code=308, headers=location)(scope, receive, send)
            return
        if scope["type"] != "lifespan" and scope["path"].startswith(f"{self._root}/"):
            scope["path"] = scope["path"].removeprefix(self._root)
        await self.app(scope, receive, send)
