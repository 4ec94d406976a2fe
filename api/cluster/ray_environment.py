"""The environment of a Ray that we start. Ray reads it when it is imported, so not here."""

from __future__ import annotations

import os
import secrets

RAY_ADDRESS = "RAY_ADDRESS"


def is_joined() -> bool:
    """Whether a Ray is there that shall be joined."""
    return bool(os.environ.get(RAY_ADDRESS))


def prepare() -> None:
    """Close a Ray that we are about to start to everybody else.

    Its processes listen on every interface, whatever address they are given: nobody without its
    token is heard.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
