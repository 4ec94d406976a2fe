"""Reject requests that web pages of other origins make in a user's browser.

A server without API keys is protected only by its address, and a browser on the same machine can
reach that address from any page. Three headers reveal such a page: its ``Origin``;
``Sec-Fetch-Site``, which browsers add to requests without an Origin; and ``Host``, if the page's
name was made to resolve to this machine (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.types import Scope

from ...serving.errors import ApiError
from ...serving.settings import Settings
from ...types.request_context import header

PAGE_PATHS = frozenset({"/", "/docs"})  # a page of another origin may link to these paths
PAGE_FILES = "/ui/"  # path prefix of the pages' files and of the live page's events
# names of loopback, and Docker's name for the host as seen from a container
LOCAL_SUFFIXES = (".localhost", "host.docker.internal")
OTHER_SITES = ("cross-site", "same-site")  # another port of this machine counts as the same site


def foreign_page(scope: Scope, settings: Settings) -> ApiError | None:
    """Return a 403 error for a request from a page of another origin; None if it is allowed.

    Servers with API keys allow every page, since a page of another origin does not know a key.
    """
    if settings.api_keys:
        return None
    host = header(scope, b"host")
    checks_host = settings.loopback_only or bool(settings.allowed_hosts)
    if checks_host and not _is_allowed(host, settings.allowed_hosts):
        return ApiError(
            403,
            f"Host '{host}' is not a name of this machine; start the server with --allowed-host"
            f" {_name(host) or 'NAME'} or an --api-key",
            kind="permission_error",
            code="foreign_host",
        )
    if _is_foreign(scope, host, settings.cors_origins):
        origin = header(scope, b"origin") or "'*'"
        return ApiError(
            403,
            "web pages of other origins must not use this server; to allow it, start the "
            "server with"
            f" --cors-origin {origin}",
            kind="permission_error",
            code="foreign_origin",
        )
    return None


def is_loopback(host: str) -> bool:
    """Whether a host name or IP address belongs to the loopback interface."""
    try:
        address = ipaddress.ip_address(host)
        # A socket for both families names a client of the old one by a mapped address.
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(LOCAL_SUFFIXES)


def _name(host: str) -> str:
    """Return the name or address in a Host header, in lower case without port; "" if malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_allowed(host: str, allowed: tuple[str, ...]) -> bool:
    """Whether requests with this Host header are accepted. Browsers always send one."""
    if not host or "*" in allowed:
        return True
    name = _name(host)
    return bool(name) and (is_loopback(name) or name in map(_name, allowed))


def _is_foreign(scope: Scope, host: str, allowed: tuple[str, ...]) -> bool:
    """Whether a request comes from a page of another origin."""
    site, origin = header(scope, b"sec-fetch-site"), header(scope, b"origin")
    if site == "same-origin" or "*" in allowed:  # pages cannot set Sec-Fetch-Site
        return False
    if origin:
        is_own = origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower())
        return not is_own and origin not in allowed
    if site not in OTHER_SITES:
        return False
    opens_page = header(scope, b"sec-fetch-mode") == "navigate" and scope["path"] in PAGE_PATHS
    return not (opens_page and scope["method"] == "GET")
