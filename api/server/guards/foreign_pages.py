"""Refuse requests that a web page of another origin makes in its reader's browser.

A server without API keys is protected by its address alone, and a browser on the same machine
reaches that address for every page that it shows. Three things give such a page away. It sends its
``Origin``; browsers add ``Sec-Fetch-Site`` to requests that carry none; and a page whose name was
made to resolve to this machine (DNS rebinding) sends that name as ``Host``.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.types import Scope

from ...serving.errors import ApiError
from ...serving.settings import Settings
from ...types.request_context import header

PAGE_PATHS = frozenset({"/", "/docs"})  # a link on any page may lead here
PAGE_FILES = "/ui/"  # what these pages load, and the events of the former
# Docker's name for the host of a container, whose loopback it reaches, and names of loopback
LOCAL_SUFFIXES = (".localhost", "host.docker.internal")
OTHER_SITES = ("cross-site", "same-site")  # another port of this machine is the same site


def foreign_page(scope: Scope, settings: Settings) -> ApiError | None:
    """Return the error 403 for a request of another origin's page to a server without keys,
    else None.
    """
    if settings.api_keys:
        return None  # a page does not have the key
    host = header(scope, b"host")
    checks_host = settings.loopback_only or bool(settings.allowed_hosts)
    if checks_host and not _is_allowed(host, settings.allowed_hosts):
        return ApiError(
            403,
            f"Host '{host}' is not this machine; start the server with --allowed-host"
            f" {_name(host) or 'NAME'} or an --api-key",
            kind="permission_error",
            code="foreign_host",
        )
    if _is_foreign(scope, host, settings.cors_origins):
        origin = header(scope, b"origin") or "'*'"
        return ApiError(
            403,
            "pages of another origin may not use this server; to permit it, start the server with"
            f" --cors-origin {origin}",
            kind="permission_error",
            code="foreign_origin",
        )
    return None


def is_loopback(host: str) -> bool:
    """Whether a host name or an IP address is this machine's alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(LOCAL_SUFFIXES)


def _name(host: str) -> str:
    """Return the name or address of a Host header, in lower case and without its port; "" if
    malformed.
    """
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_allowed(host: str, allowed: tuple[str, ...]) -> bool:
    """Whether requests for ``host``, with or without a port, are served; browsers send one."""
    if not host or "*" in allowed:
        return True
    name = _name(host)
    return bool(name) and (is_loopback(name) or name in map(_name, allowed))


def _is_foreign(scope: Scope, host: str, allowed: tuple[str, ...]) -> bool:
    """Whether a page of another origin than this server's own sent a request."""
    site, origin = header(scope, b"sec-fetch-site"), header(scope, b"origin")
    if site == "same-origin" or "*" in allowed:  # a page cannot set the former
        return False
    if origin:
        is_own = origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower())
        return not is_own and origin not in allowed
    opens_page = header(scope, b"sec-fetch-mode") == "navigate" and scope["path"] in PAGE_PATHS
    return site in OTHER_SITES and not (opens_page and scope["method"] == "GET")
