"""The environment of a Ray that we start. Ray reads it when it is imported, so not here."""

from __future__ import annotations

import os
import secrets

RAY_ADDRESS = "RAY_ADDRESS"
GIVE_UP_SECONDS = "RAY_gcs_rpc_server_reconnect_timeout_s"
NOWHERE = ("", "local")  # addresses at which no Ray is joined


def is_joined() -> bool:
    """Whether a Ray is there that shall be joined."""
    return os.environ.get(RAY_ADDRESS, "") not in NOWHERE


def prepare() -> None:
    """Set the variables of a Ray that we are about to start, or to join."""
    # By default a process ends when the head has been gone for a minute. Ours serve on.
    os.environ[GIVE_UP_SECONDS] = str(10**8)
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
    if is_joined():
        # Attempts to reach the head, of 40 s each; 20 by default.
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    else:
        _close()


def _close() -> None:
    """Close a Ray that we are about to start to everybody else.

    Its processes listen on every interface, whatever address they are given: nobody without its
    token is heard.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
