"""AuthMiddleware: checks the protocol, the connection, the API key and the origin of requests."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from itertools import chain
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from ...dialects import api_of
from ...serving.errors import ApiError
from ...serving.settings import Settings
from ...types.request_context import CONTEXT, NOBODY, caller_of, header
from ..error_forms import error_response
from .foreign_pages import PAGE_FILES, PAGE_PATHS, foreign_page

# load balancers must see that a server is alive, even if it is full
OPEN_PATHS = frozenset({"/health"})
IS_SPARE = "is_spare"  # set in the ASGI state of a connection above the limit
OPERATOR_PREFIX = "/debug/"
VERSIONS = ("1.1", "1.0")
JSON, FORM = "application/json", "multipart/form-data"
UPLOAD_PATH = "/v1/files"
CLOSE = {"connection": "close"}
FIELD_BYTES = 4  # bytes of a header field in addition to name and value: ": " and CRLF


class AuthMiddleware:
    """Rejects callers without an API key and web pages of other origins.

    Stores the caller of each request in its context.

    Every path requires the key unless it is in ``OPEN_PATHS``. The path is read from the scope,
    since the Host header can be forged.
    """

    def __init__(self, app: ASGIApp, settings: Settings, operator_paths: Collection[str]) -> None:
        """Keep the digests of all keys. ``operator_paths``: paths that require an admin key."""
        self.app, self._operator_paths = app, operator_paths
        self._settings = settings
        self._limits = settings.limits
        self._needs_key = bool(settings.api_keys)
        self._has_page = settings.ui
        self._admins = _digests(settings.admin_keys)
        self._callers = [*_digests(settings.api_keys), *self._admins]
        # Several API keys mean different tenants, so without an admin key none of them is an admin.
        self._all_are_admins = not self._admins and len(settings.api_keys) <= 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or reject it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        offered = _key_digests(scope)
        known = _known_key(self._callers, offered)
        state["is_admin"] = self._all_are_admins or known in self._admins
        refusal = self.refusal(scope, known)
        answer = self.app if refusal is None else error_response(scope, refusal)
        context = CONTEXT.get()
        if context is not None:
            context.caller = known or (offered[0] if offered else NOBODY)
        await answer(scope, receive, send)

    def refusal(self, scope: Scope, known: bytes | None) -> ApiError | None:
        """Return the error for a request that is refused; None if it is allowed.

        ``known``: the configured key that the request has.
        """
        return self._malformed(scope) or self._unwelcome(scope, known)

    def handshake_refusal(self, scope: Scope) -> ApiError | None:
        """Return the error for a WebSocket's handshake that is refused, as for a GET request."""
        request = {**scope, "method": "GET"}
        return self.refusal(request, _known_key(self._callers, _key_digests(request)))

    def _malformed(self, scope: Scope) -> ApiError | None:
        if scope["http_version"] not in VERSIONS:
            return ApiError(505, "only HTTP/1.1 and HTTP/1.0 are supported", headers=CLOSE)
        if len(scope["headers"]) > self._limits.max_header_fields:
            most = self._limits.named("max_header_fields")
            return ApiError(431, f"the request exceeds the limit of header fields, {most}")
        if _num_bytes(scope) > self._limits.max_header_bytes:
            size = self._limits.named("max_header_bytes")
            return ApiError(431, f"the request headers are longer than {size} bytes")
        names = dict(scope["headers"])
        if b"transfer-encoding" in names and (
            b"content-length" in names or scope["http_version"] == "1.0"
        ):
            message = "Transfer-Encoding must not be combined with Content-Length or HTTP/1.0"
            return ApiError(400, message, headers=CLOSE)
        return None

    def _unwelcome(self, scope: Scope, known: bytes | None) -> ApiError | None:
        path: str = scope["path"]
        if path in OPEN_PATHS:
            return None
        if IS_SPARE in scope["state"]:
            return self._full()
        refusal = foreign_page(scope, self._settings)
        is_operators = path in self._operator_paths or path.startswith(OPERATOR_PREFIX)
        is_page = path in PAGE_PATHS or (path.startswith(PAGE_FILES) and not is_operators)
        if refusal is not None or (is_page and self._has_page):
            return refusal  # None for a page: it holds no secrets and asks the user for the key
        needs_admin = is_operators and not self._all_are_admins
        if known is None and (self._needs_key or needs_admin):
            return ApiError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if needs_admin and known not in self._admins:
            return needs_admin_key(path)
        return None if self._needs_key else _not_json(scope)

    def _full(self) -> ApiError:
        most = self._limits.named("max_connections")
        return ApiError(
            503,
            f"the server has reached its limit of open connections, {most}",
            kind="server_error",
            code="too_many_connections",
            headers={"retry-after": "1"},
        )


def _not_json(scope: Scope) -> ApiError | None:
    """Return a 415 error for a type other than JSON, which pages can send without a preflight."""
    given = header(scope, b"content-type").partition(";")[0].strip().lower()
    if scope["method"] != "POST" or given in ("", JSON) or given.endswith("+json"):
        return None
    if scope["path"] == UPLOAD_PATH and given == FORM:
        return None  # a stored file has no effect, and the request's origin was checked
    message = f"Content-Type must be {JSON} (curl: use --json instead of -d), not {given}"
    return ApiError(415, message)


def needs_admin_key(what: str) -> ApiError:
    """Return the 403 error for ``what``, an action that affects all callers."""
    message = f"{what} needs an admin key (--admin-key)"
    return ApiError(403, message, kind="permission_error", code="admin_key_needed")


def _num_bytes(scope: Scope) -> int:
    headers = scope["headers"]
    fields = len(headers) * FIELD_BYTES + sum(map(len, chain.from_iterable(headers)))
    return fields + len(scope.get("raw_path") or b"") + len(scope["query_string"])


def _digests(keys: Sequence[str]) -> list[bytes]:
    """Return the digests of keys. A key from the command line may be invalid UTF-8."""
    return [caller_of(key.encode("utf-8", "surrogateescape")) for key in keys]


def _key_digests(scope: Scope) -> list[bytes]:
    """Return the digest of each key in a request. All digests have the same length."""
    scheme, _, token = header(scope, b"authorization").partition(" ")
    api = api_of(scope)
    shown = [token.strip()] if token and scheme.lower() == "bearer" else []
    for name in api.key_headers:
        shown.append(header(scope, name))
    if api.key_parameter is not None:
        query = parse_qs(scope["query_string"].decode("latin-1"))
        shown += query.get(api.key_parameter, ())
    return [caller_of(key) for key in shown if key] if shown else []


def _known_key(digests: Sequence[bytes], offered: Sequence[bytes]) -> bytes | None:
    """Return the first known key in a request, comparing all keys in constant time."""
    if not offered:
        return None
    found = [digest for digest in digests for each in offered if hmac.compare_digest(digest, each)]
    return found[0] if found else None
